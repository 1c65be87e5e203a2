/* logits_short.cu - which rows of logits are short, how many lanes share one, how many a tile
 * holds, and which kernel serves them. Enqueues only. */
#include "kernels/cuda/row.cuh"

/* Elements of a lane for which there are kernels (logits_short.cuh), by how many of them lie side
 * by side; those that keep more of an element have the smaller ones only. */
static const uint32_t sizes_1[] = {3, 5, 8, 13, 16}, sizes_2[] = {2, 4, 6, 10, 16},
                      sizes_16[] = {4, 8, 16};

/* Where no gradient needs a sum over the row, a lane holds more elements. Says the rule and the
 * tensors that are asked for, not where they lie. */
static bool is_simple(const kld_cuda_args *args) {
    if (args->rule.kind == KLD_RULE_MIXTURE)
        return !args->grad_p.dtype && !args->grad_q.dtype;
    return args->rule.kind == KLD_RULE_KL && !args->grad_p.dtype &&
           (!args->grad_q.dtype || args->rule.of_q == 0);
}

/* The best of some sizes so far: what the lanes of a warp spend on a row, in elements. */
struct choice {
    uint32_t cost, team, elements, width;
};

/* What a lane spends on a row besides its elements, each of which is 10; on a step of its sums. */
struct row_costs {
    uint32_t row, step;
};

static void consider(choice *best, uint32_t classes, uint32_t element, uint32_t width,
                     const uint32_t *sizes, int count, row_costs costs) {
    for (int i = 0; i < count; i++) {
        uint32_t size = sizes[i], team = 1;
        if (size % width)
            continue;
        while (team * size < classes)
            team *= 2;
        if (team > 32)
            continue;
        /* Single loads cost more; shuffles and what is done once a row. */
        uint32_t steps = 0;
        for (uint32_t at = 1; at < team; at *= 2)
            steps++;
        uint32_t loads = width == 1 ? 12 : width == 2 ? 11 : 10;
        /* Lanes load 16 bytes each, 8 lanes at a time: not from the same banks. */
        uint32_t vectors = classes / width, shared = 8;
        while (vectors % shared)
            shared /= 2;
        if (width * element == 16 && shared > 2 * team)
            continue;
        uint32_t cost = team * (size * loads + costs.row + costs.step * steps);
        if (cost < best->cost)
            *best = {cost, team, size, width};
    }
}

#define COUNT(x) ((int)(sizeof(x) / sizeof(x)[0]))

/* FP32 gradients that a sum over the row is taken off: in FP64. That of the cross entropy by the
 * predictions, where rows are too short to be read again (resident.cu); and q - p of few classes
 * where the device is good at FP64. */
static bool is_wide(const kld_cuda_args *args) {
    if (args->p.dtype != KLD_DTYPE_FP32 || !(args->grad_p.dtype || args->grad_q.dtype))
        return false;
    if (is_simple(args))
        return args->has_fp64 && args->classes <= 256;
    return args->rule.kind != KLD_RULE_CROSS_ENTROPY || args->grad_p.dtype || args->classes <= 256;
}

/* How many rows a tile and a group have, whose elements are of so many bytes. */
static void fill_tiles(kld_cuda_args *args, uint64_t job_rows, uint32_t element,
                       uint32_t tile_bytes) {
    uint32_t at_once = 32 / args->team;
    uint32_t rounds = tile_bytes / (at_once * (uint32_t)args->classes * element);
    args->tile_rows = at_once * (rounds < 1 ? 1 : rounds < 32 ? rounds : 32);
    /* A group for each warp, or a number of them that many numbers of warps divide. */
    uint64_t tiles = (job_rows + args->tile_rows - 1) / args->tile_rows;
    uint64_t most = 240ull * args->multiprocessors;
    while (most > KLD_CUDA_GROUPS_MAX)
        most /= 2;
    args->group_rows = (tiles + most - 1) / most * args->tile_rows;
}

static void take(kld_cuda_args *args, const choice &best) {
    args->team = best.team;
    args->lane_elements = best.elements;
    args->lane_width = best.width;
}

/* Four elements of each lane at a time. */
static choice parts_of(uint32_t classes) {
    choice parts = {0, 1, 0, 0};
    while (parts.team < 32 && parts.team * 4 < classes)
        parts.team *= 2;
    return parts;
}

/* A row's classes are costly there, and what is done once a row costs as much as two of them. Rows
 * of more classes than the lanes of a warp hold, or of which both gradients are wanted, are taken
 * in parts. */
static void wide_layout(kld_cuda_args *args, uint64_t job_rows) {
    static const uint32_t sizes_1[] = {3, 5, 8}, sizes_2[] = {2, 6, 10}, sizes_4[] = {4, 8};
    const uint32_t classes = (uint32_t)args->classes;
    const row_costs costs = {20, 6};
    choice best = parts_of(classes);
    if (!args->grad_p.dtype || !args->grad_q.dtype) {
        best.cost = UINT32_MAX;
        if (classes % 4 == 0)
            consider(&best, classes, 4, 4, sizes_4, COUNT(sizes_4), costs);
        if (classes % 2 == 0)
            consider(&best, classes, 4, 2, sizes_2, COUNT(sizes_2), costs);
        consider(&best, classes, 4, 1, sizes_1, COUNT(sizes_1), costs);
    }
    take(args, best);
    bool few = best.elements && best.elements <= 3;
    fill_tiles(args, job_rows, 4, few ? KLD_CUDA_SHORT_TILE_BYTES : KLD_CUDA_WIDE_TILE_BYTES);
}

extern "C" void kld_cuda_short_layout(kld_cuda_args *args, uint64_t job_rows) {
    uint32_t element = dtype_bytes(args->p.dtype), whole = 16 / element;
    args->tile_rows = 0;
    if (is_wide(args) && args->classes <= KLD_CUDA_WIDE_TILE_BYTES / 4) {
        wide_layout(args, job_rows);
        return;
    }
    bool gradient = args->grad_p.dtype || args->grad_q.dtype, simple = is_simple(args);
    /* FP32 gradients that were too long for is_wide() are read again. */
    if (args->classes > 512 || (element == 4 && gradient && !simple))
        return;
    uint32_t classes = (uint32_t)args->classes;
    bool few = !simple || (element == 4 && gradient);
    const row_costs costs = {50, 7};
    choice best = {UINT32_MAX, 0, 0, 0};
    if (classes % whole == 0)
        consider(&best, classes, element, whole, sizes_16, few ? 2 : COUNT(sizes_16), costs);
    if (classes % 2 == 0)
        consider(&best, classes, element, 2, sizes_2, few ? 4 : COUNT(sizes_2), costs);
    consider(&best, classes, element, 1, sizes_1, few ? 3 : COUNT(sizes_1), costs);
    if (!best.team)
        return;
    take(args, best);
    fill_tiles(args, job_rows, element, KLD_CUDA_SHORT_TILE_BYTES);
}

extern "C" cudaError_t kld_cuda_short_rows(const kld_cuda_args *args, uint32_t groups,
                                           cudaStream_t stream) {
    if (is_wide(args))
        return args->rule.kind == KLD_RULE_KL ? kld_cuda_short_wide(args, groups, stream)
                                              : kld_cuda_short_wide_others(args, groups, stream);
    bool simple = is_simple(args);
    switch (args->p.dtype) {
    case KLD_DTYPE_FP16:
        return simple ? kld_cuda_short_fp16(args, groups, stream)
                      : kld_cuda_short_general_fp16(args, groups, stream);
    case KLD_DTYPE_BF16:
        return simple ? kld_cuda_short_bf16(args, groups, stream)
                      : kld_cuda_short_general_bf16(args, groups, stream);
    default:
        return simple ? kld_cuda_short_fp32(args, groups, stream)
                      : kld_cuda_short_general_fp32(args, groups, stream);
    }
}

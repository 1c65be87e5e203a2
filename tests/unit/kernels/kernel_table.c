/* kernel_table.c - the program `kernel-table`: runs the case table on every back end that has a
 * device, with nothing but the binary. Exit status 1 if a case failed, 2 for a wrong option. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/unit/kernels/table.h"

#define RANDOM_MAX 100000
#define ALONE_ROWS 3 /* of a case whose rows are of one kind */

struct settings {
    const char *backend, *filter, *json;
    bool quick;
    uint64_t seed, every; /* of the cases, each every-th, from seed % every on */
    uint64_t random;      /* so many at random in place of the list; 0: the list */
};

struct totals {
    unsigned passed, failed;
    FILE *json;
    double read_per_s, read_write_per_s;
};

static const char usage[] =
    "kernel-table [--backend cpu|cuda|all] [--quick] [--filter TEXT] [--every N]\n"
    "             [--seed N] [--json FILE] [--random N]\n"
    "Computes a table of cases on each back end, or N cases at random, and compares with long\n"
    "double arithmetic.\n";

static bool parse(int argc, char **argv, struct settings *settings) {
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--quick") == 0) {
            settings->quick = true;
            continue;
        }
        if (!value)
            return false;
        if (strcmp(argv[i], "--backend") == 0)
            settings->backend = value;
        else if (strcmp(argv[i], "--filter") == 0)
            settings->filter = value;
        else if (strcmp(argv[i], "--json") == 0)
            settings->json = value;
        else if (strcmp(argv[i], "--seed") == 0)
            settings->seed = strtoull(value, NULL, 0);
        else if (strcmp(argv[i], "--every") == 0)
            settings->every = strtoull(value, NULL, 0);
        else if (strcmp(argv[i], "--random") == 0)
            settings->random = strtoull(value, NULL, 0);
        else
            return false;
        i++;
    }
    return settings->every > 0 && settings->random < RANDOM_MAX;
}

/* The same case in other places and again: other bits are a failure. */
static bool run_variants(struct kld_device *device, const struct table_truth *truth,
                         const struct table_case *at, const struct table_outputs *first,
                         char *failure) {
    static const struct {
        const char *name;
        struct table_place place;
    } variants[] = {
        {"one element off alignment", {TABLE_POOL, 1, false, 1}},
        {"gradients in place", {TABLE_POOL, 0, true, 1}},
        {"wrapped host memory, off alignment", {TABLE_WRAPPED, 3, false, 1}},
        {"mapped memory, in place", {TABLE_MAPPED, 1, true, 1}},
    };
    for (size_t i = 0; i < (at->speed ? 2 : 4); i++) {
        struct table_outputs outputs;
        char text[256] = "";
        bool fine = table_run(device, truth, at, &variants[i].place, &outputs, text) &&
                    table_outputs_equal(truth, first, &outputs, text);
        table_outputs_done(&outputs);
        if (!fine) {
            snprintf(failure, 256, "%s: %.200s", variants[i].name, text);
            return false;
        }
    }
    return true;
}

/* A row by itself must give the bits that it gave among the others. */
static bool run_alone(struct kld_device *device, const struct table_truth *truth,
                      const struct table_case *at, const struct table_outputs *outputs,
                      char *failure) {
    if (at->speed || truth->geometry.rows < 2)
        return true;
    uint32_t rows = at->distinct ? at->distinct : ALONE_ROWS;
    return table_run_alone(device, truth, at, outputs, rows, failure);
}

/* A divergence whose parameter makes it another must give the other's bits. */
static bool run_alias(struct kld_device *device, const struct table_truth *truth,
                      const struct table_case *at, const struct table_outputs *first,
                      char *failure) {
    const struct table_place plain = {TABLE_POOL, 0, false, 1};
    struct table_truth alias;
    struct table_outputs outputs;
    char text[256] = "";
    if (!at->aliased)
        return true;
    table_truth_alias(truth, at, &alias);
    bool fine = table_run(device, &alias, at, &plain, &outputs, text) &&
                table_outputs_equal(truth, first, &outputs, text);
    table_outputs_done(&outputs);
    if (!fine)
        snprintf(failure, 256, "as %s: %.200s", kld_divergence_name(at->alias), text);
    return fine;
}

static void report(const struct kld_device *device, const struct table_case *at,
                   const struct table_outputs *outputs, const char *failure,
                   struct totals *totals) {
    double per_s = outputs->best_ns ? (double)outputs->bytes * 1e9 / (double)outputs->best_ns : 0;
    double ceiling =
        at->gradient[0] || at->gradient[1] ? totals->read_write_per_s : totals->read_per_s;
    double share = ceiling > 0 ? per_s / ceiling : 0;
    const char *backend = device->info.backend;
    if (failure[0])
        printf("FAIL %s: %s: %s, temperature %g, parameter %g\n", backend, at->name, failure,
               at->temperature, at->parameter);
    else if (at->speed)
        printf("     %s: %-32s %9.3f ms %8.2f GB/s  %.2f of ceiling\n", backend, at->name,
               (double)outputs->best_ns * 1e-6, per_s * 1e-9, share);
    if (!totals->json)
        return;
    fprintf(totals->json, "%s\n  {\"backend\": \"%s\", \"case\": \"%s\", \"passed\": %s",
            totals->passed + totals->failed ? "," : "", backend, at->name,
            failure[0] ? "false" : "true");
    if (at->speed)
        fprintf(totals->json, ", \"ms\": %.4f, \"gb_per_s\": %.3f, \"share_of_ceiling\": %.3f",
                (double)outputs->best_ns * 1e-6, per_s * 1e-9, share);
    fprintf(totals->json, "}");
}

static void run_case(struct kld_device *device, const struct table_case *at, uint64_t seed,
                     struct totals *totals) {
    struct table_truth truth;
    struct table_outputs outputs = {0};
    char failure[256] = "";
    const struct table_place plain = {TABLE_POOL, 0, false, at->once ? 1 : 3};
    table_truth_init(&truth, at, seed);
    if (truth.failure[0])
        snprintf(failure, sizeof failure, "%s", truth.failure);
    else if (table_run(device, &truth, at, &plain, &outputs, failure) &&
             table_check(&truth, at, &outputs, failure) && !at->once &&
             run_variants(device, &truth, at, &outputs, failure) &&
             run_alone(device, &truth, at, &outputs, failure))
        run_alias(device, &truth, at, &outputs, failure);
    report(device, at, &outputs, failure, totals);
    *(failure[0] ? &totals->failed : &totals->passed) += 1;
    table_outputs_done(&outputs);
    table_truth_done(&truth);
}

static void run_backend(const struct kld_backend *backend, const struct settings *settings,
                        struct totals *totals) {
    struct kld_error err;
    struct kld_device *device;
    uint32_t devices = 0;
    const struct kld_device_options options = {.spin_us = 20};
    if (backend->device_count(&devices, &err) || devices == 0) {
        printf("     %s: no device (%s)\n", backend->name, err.text);
        return;
    }
    if (backend->device_open(&options, &device, &err)) {
        printf("FAIL %s: cannot open the device: %s\n", backend->name, err.text);
        totals->failed++;
        return;
    }
    printf("     %s: %s, %u threads\n", backend->name, device->info.name, device->info.threads);
    totals->read_per_s = totals->read_write_per_s = 0;
    if (!settings->quick) {
        backend->measure_ceiling(device, 64u << 20, &totals->read_per_s, &totals->read_write_per_s,
                                 &err);
        printf("     %s: ceiling %.1f GB/s read, %.1f GB/s read and written\n", backend->name,
               totals->read_per_s * 1e-9, totals->read_write_per_s * 1e-9);
    }
    size_t count = settings->random;
    struct table_case *cases =
        count ? table_cases_random(settings->seed, count) : table_cases(settings->quick, &count);
    for (size_t i = 0; cases && i < count; i++)
        if (i % settings->every == settings->seed % settings->every &&
            (!settings->filter || strstr(cases[i].name, settings->filter)))
            run_case(device, &cases[i], settings->seed + i * 0x9e3779b97f4a7c15u, totals);
    free(cases);
    if (backend->pool_bytes(device) != 0) {
        printf("FAIL %s: %llu bytes of the pool left over\n", backend->name,
               (unsigned long long)backend->pool_bytes(device));
        totals->failed++;
    }
    backend->device_close(device);
}

int main(int argc, char **argv) {
    struct settings settings = {.backend = "all", .seed = (uint64_t)time(NULL), .every = 1};
    struct totals totals = {0};
    if (!parse(argc, argv, &settings)) {
        fputs(usage, stderr);
        return 2;
    }
    if (settings.json && !(totals.json = fopen(settings.json, "w"))) {
        fprintf(stderr, "kernel-table: cannot write the file given with --json\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("     seed %llu\n", (unsigned long long)settings.seed);
    if (totals.json)
        fputs("[", totals.json);
    for (size_t i = 0; kld_backends()[i]; i++)
        if (strcmp(settings.backend, "all") == 0 ||
            strcmp(settings.backend, kld_backends()[i]->name) == 0)
            run_backend(kld_backends()[i], &settings, &totals);
    if (totals.json) {
        fputs("\n]\n", totals.json);
        fclose(totals.json);
    }
    if (totals.passed + totals.failed == 0) {
        printf("FAIL no case ran\n");
        totals.failed = 1;
    }
    printf("kernel table: %u passed, %u failed\n", totals.passed, totals.failed);
    return totals.failed ? 1 : 0;
}

/* client.c - a program that uses libkld while the N-th call of a kind fails in it (nth.c, loaded
 * before libc), for each N: after each, the same part undisturbed has to be right, and nothing may
 * be left of it in this process. tests/e2e/test_fail_client.py starts it, and looks at the server.
 *
 *   client PART WIDTH URL URL|- KIND:FIRST:STEP...
 *
 * A line for each N: the kind, N, what came of it, milliseconds, the call, the text of the error
 * and where the call was, with tabs between them. A call that never returns ends it by SIGALRM. */
#include "tests/fail/client.h"
#include "tests/fail/nth.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define SECONDS_MAX 20 /* of a part: else it hangs */
#define FRAMES_TOLD 8
#define SETTLE_US 10000

static struct nth_slot *slot;
static enum nth_kind kind;

void calm_begins(void) { atomic_store(&slot->kind, NTH_NONE); }
void calm_ends(void) { atomic_store(&slot->kind, kind); }

/* ---- what is in use -------------------------------------------------------------------------- */

struct holdings {
    int64_t blocks;
    int fds, mappings, threads;
};

static int entries(const char *folder) {
    DIR *all = opendir(folder);
    int count = 0;
    while (all && readdir(all))
        count++;
    if (all)
        closedir(all);
    return count;
}

static int lines_of(const char *path) {
    static char text[1 << 16];
    int count = 0, fd = open(path, O_RDONLY | O_CLOEXEC);
    for (ssize_t got; fd >= 0 && (got = read(fd, text, sizeof text)) > 0;)
        for (ssize_t i = 0; i < got; i++)
            count += text[i] == '\n';
    close(fd);
    return count;
}

static struct holdings holdings(void) {
    struct holdings now;
    now.blocks = atomic_load(&slot->blocks);
    now.fds = entries("/proc/self/fd");
    now.threads = entries("/proc/self/task");
    now.mappings = lines_of("/proc/self/maps");
    return now;
}

static bool is_more(const struct holdings *now, const struct holdings *before) {
    return now->blocks > before->blocks || now->fds > before->fds ||
           now->mappings > before->mappings || now->threads > before->threads;
}

/* libcurl's thread that looks for a name may still be about to end. */
static struct holdings settled(const struct holdings *before) {
    struct holdings now = holdings();
    for (int turn = 0; turn < 20 && is_more(&now, before); turn++) {
        usleep(SETTLE_US);
        now = holdings();
    }
    return now;
}

/* ---- one N ----------------------------------------------------------------------------------- */

/* What is swept. */
struct sweep {
    const struct part *part;
    uint64_t width; /* calls that fail at a time */
    const char *url, *other_url;
    struct holdings base;
};

struct seen {
    struct script script;
    uint64_t failed;
    unsigned ms;
    struct nth_slot slot;
};

static void run(const struct sweep *sweep, struct script *ret_script) {
    *ret_script = (struct script){.url = sweep->url, .other_url = sweep->other_url};
    sweep->part->run(ret_script);
}

static void disturbed(const struct sweep *sweep, uint64_t first, struct seen *ret) {
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    atomic_store(&slot->first, first);
    atomic_store(&slot->last, first + sweep->width - 1);
    atomic_store(&slot->count, 0);
    atomic_store(&slot->failed, 0);
    calm_ends();
    run(sweep, &ret->script);
    calm_begins();
    clock_gettime(CLOCK_MONOTONIC, &end);
    ret->failed = atomic_load(&slot->failed);
    ret->slot = *slot;
    ret->ms =
        (unsigned)((end.tv_sec - begin.tv_sec) * 1000 + (end.tv_nsec - begin.tv_nsec) / 1000000);
}

static void tell(uint64_t n, const char *what, const struct seen *seen, const char *text) {
    printf("%d\t%llu\t%s\t%u\t%s\t%s\t", kind, (unsigned long long)n, what, seen->ms,
           seen->slot.call, text);
    for (uint32_t i = 0, told = 0; i < seen->slot.frames && told < FRAMES_TOLD; i++) {
        Dl_info info;
        if (!dladdr((void *)(uintptr_t)seen->slot.frame[i], &info) ||
            strstr(info.dli_fname, "nth.so"))
            continue;
        printf("%s+%llx ", info.dli_fname,
               (unsigned long long)(seen->slot.frame[i] - (uintptr_t)info.dli_fbase - 1));
        told++;
    }
    printf("\n");
    fflush(stdout);
}

/* What was left behind each time, of three, is a leak; the first time alone, it filled a cache. */
static bool leaks(struct sweep *sweep, uint64_t first, char text[200]) {
    struct holdings *base = &sweep->base, now = settled(base);
    for (int again = 0; is_more(&now, base); again++) {
        snprintf(text, 200, "blocks %lld, descriptors %d, mappings %d, threads %d more",
                 (long long)(now.blocks - base->blocks), now.fds - base->fds,
                 now.mappings - base->mappings, now.threads - base->threads);
        *base = now;
        if (again == 3)
            return true;
        struct seen seen;
        struct script calm;
        disturbed(sweep, first, &seen);
        run(sweep, &calm);
        now = settled(base);
    }
    return false;
}

static bool one(struct sweep *sweep, uint64_t first) {
    static const char *const names[] = {"right", "clear", "blamed", "wrong"};
    struct seen seen;
    struct script calm;
    char text[200];
    alarm(SECONDS_MAX);
    printf("%d\t%llu\tbegins\n", kind, (unsigned long long)first);
    fflush(stdout);
    disturbed(sweep, first, &seen);
    if (!seen.failed && seen.script.outcome != RIGHT)
        tell(first, "wrong", &seen, seen.script.text);
    if (!seen.failed)
        return false;
    tell(first, names[seen.script.outcome], &seen, seen.script.text);
    alarm(SECONDS_MAX);
    run(sweep, &calm);
    if (calm.outcome != RIGHT)
        tell(first, "afterwards", &seen, calm.text);
    alarm(5 * SECONDS_MAX);
    if (leaks(sweep, first, text))
        tell(first, "leak", &seen, text);
    return true;
}

/* ---- all ------------------------------------------------------------------------------------- */

static bool open_page(void) {
    const char *path = getenv("NTH_PAGE");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    struct nth_page *page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (page == MAP_FAILED)
        return false;
    slot = &page->slot[NTH_OTHER];
    return atomic_load(&slot->pid) == (uint32_t)getpid();
}

static int usage(const char *text) {
    fprintf(stderr, "client: %s; expected PART WIDTH URL URL|- KIND:FIRST:STEP...\n", text);
    return 2;
}

/* Whatever is done the first time only. */
static bool warm(const struct sweep *sweep) {
    for (int i = 0; i < 3; i++) {
        struct script script;
        alarm(SECONDS_MAX);
        run(sweep, &script);
        if (script.outcome == RIGHT)
            continue;
        fprintf(stderr, "client: undisturbed: %s\n", script.text);
        return false;
    }
    return true;
}

int main(int argc, char **argv) {
    if (argc < 6)
        return usage("too few arguments");
    struct sweep sweep = {.part = client_parts,
                          .width = strtoull(argv[2], NULL, 10),
                          .url = argv[3],
                          .other_url = argv[4]};
    while (sweep.part->name && strcmp(sweep.part->name, argv[1]) != 0)
        sweep.part++;
    if (!sweep.part->name)
        return usage("no such part");
    if (!open_page() || !client_parts_open())
        return usage("nth.so is not loaded, or has no page");
    calm_begins();
    if (!warm(&sweep))
        return 1;
    for (int i = 5; i < argc; i++) {
        unsigned number;
        unsigned long long first, step;
        if (sscanf(argv[i], "%u:%llu:%llu", &number, &first, &step) != 3)
            return usage("not a kind with the first and each further N");
        kind = (enum nth_kind)number;
        sweep.base = holdings();
        while (one(&sweep, first))
            first += step;
    }
    return 0;
}

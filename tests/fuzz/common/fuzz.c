/* fuzz.c - see fuzz.h. */
#include "tests/fuzz/common/fuzz.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "server/log.h"

#define FDS_WAIT_NS 5000000000ull
#define LEAKS_EVERY 2000 /* looking stops all threads for some 10 ms */

#if __has_feature(address_sanitizer)
int __lsan_do_recoverable_leak_check(void);
#else
static int __lsan_do_recoverable_leak_check(void) { return 0; }
#endif

void fuzz_broken(const char *promise, const char *file, int line) {
    fprintf(stderr, "%s:%d: a promise is broken: %s\n", file, line, promise);
    abort();
}

void require_error(enum kld_status status, const struct kld_error *err) {
    require(err->status == status && status != KLD_OK && kld_status_known(status));
    require(memchr(err->text, 0, sizeof err->text) != NULL && err->text[0] != 0);
}

uint8_t fuzz_byte(struct fuzz_input *input) { return input->at < input->end ? *input->at++ : 0; }

size_t fuzz_bytes(struct fuzz_input *input, void *to, size_t bytes) {
    size_t left = (size_t)(input->end - input->at);
    bytes = bytes < left ? bytes : left;
    if (bytes)
        memcpy(to, input->at, bytes);
    input->at += bytes;
    return bytes;
}

uint16_t fuzz_short(struct fuzz_input *input) {
    uint16_t value = 0;
    fuzz_bytes(input, &value, sizeof value);
    return value;
}

uint64_t fuzz_long(struct fuzz_input *input) {
    uint64_t value = 0;
    fuzz_bytes(input, &value, sizeof value);
    return value;
}

char *fuzz_text(struct fuzz_input *input) {
    const uint8_t *end = input->at;
    while (end < input->end && *end && *end != '\n')
        end++;
    size_t bytes = (size_t)(end - input->at);
    char *text = malloc(bytes + 1);
    require(text != NULL);
    fuzz_bytes(input, text, bytes);
    text[bytes] = '\0';
    fuzz_byte(input);
    return text;
}

/* Pipes are left out: libFuzzer has some to its symbolizer, from when it wants one. */
unsigned fuzz_open_fds(void) {
    DIR *folder = opendir("/proc/self/fd");
    unsigned count = 0;
    struct stat stat;
    require(folder != NULL);
    for (const struct dirent *entry; (entry = readdir(folder));)
        if (entry->d_name[0] != '.' && fstat(atoi(entry->d_name), &stat) == 0)
            count += !S_ISFIFO(stat.st_mode);
    closedir(folder);
    return count - 1; /* the folder's own */
}

void fuzz_require_fds(unsigned expected) {
    uint64_t until = fuzz_now_ns() + FDS_WAIT_NS;
    while (fuzz_open_fds() != expected && fuzz_now_ns() < until)
        fuzz_nap_us(100);
    if (fuzz_open_fds() == expected)
        return;
    for (int fd = 0; fd < 1024; fd++) {
        char path[40], name[200];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(path, name, sizeof name);
        if (length > 0)
            fprintf(stderr, "%d: %.*s\n", fd, (int)length, name);
    }
    fprintf(stderr, "%u descriptors are open, %u were expected\n", fuzz_open_fds(), expected);
    fuzz_broken("no descriptor is left, none was closed that is another's", __FILE__, __LINE__);
}

void fuzz_log_to_nowhere(const char *level) {
    struct kld_error err;
    int null = open("/dev/null", O_WRONLY | O_CLOEXEC), ours = dup(STDERR_FILENO);
    require(null >= 0 && ours >= 0 && dup2(null, STDERR_FILENO) == STDERR_FILENO);
    require(kld_log_init("fuzz", level, "json", &err) == KLD_OK);
    require(dup2(ours, STDERR_FILENO) == STDERR_FILENO);
    close(null);
    close(ours);
}

uint64_t fuzz_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void fuzz_nap_us(unsigned us) {
    struct timespec time = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000L};
    nanosleep(&time, NULL);
}

void fuzz_require_no_leaks(void) {
    static unsigned calls;
    if (++calls % LEAKS_EVERY == 0)
        require(__lsan_do_recoverable_leak_check() == 0);
}

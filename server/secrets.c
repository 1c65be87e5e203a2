/* secrets.c - reads the small files that hold secrets, packs and unpacks them (secrets.h). It does
 * not look into them. Supervisor: main thread at start, uv's pool later; gateway: the same. */
#include "server/secrets.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SETTINGS 4 /* of KLD_SECRET_MAP */
#define SEALS (F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE)

/* What the memfd begins with; the texts follow without their NULs. */
struct head {
    uint32_t given[SETTINGS]; /* 1: configured, maybe with an empty file */
    uint32_t bytes[SETTINGS];
};

static char **text_of(struct kld_secrets *secrets, size_t i) {
#define X(setting) &secrets->setting,
    char **const texts[] = {KLD_SECRET_MAP(X)};
#undef X
    _Static_assert(sizeof texts / sizeof texts[0] == SETTINGS, "as many as the map has");
    return texts[i];
}

static void forget(char *text) {
    if (text) /* all of it: who reads it may have put NULs in */
        explicit_bzero(text, malloc_usable_size(text));
    free(text);
}

void kld_secrets_forget(struct kld_secrets *secrets) {
    for (size_t i = 0; i < SETTINGS; i++)
        forget(*text_of(secrets, i));
    memset(secrets, 0, sizeof *secrets);
}

/* All of it, or -1. */
static ssize_t read_all(int fd, char *to, size_t size) {
    size_t got = 0;
    while (got < size) {
        ssize_t step = read(fd, to + got, size - got);
        if (step < 0 && errno == EINTR)
            continue;
        if (step < 0)
            return -1;
        if (step == 0)
            break;
        got += (size_t)step;
    }
    return (ssize_t)got;
}

static enum kld_status read_text(const char *setting, int fd, char **ret_text,
                                 struct kld_error *err) {
    struct stat info;
    if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode))
        return kld_error_set(err, KLD_INVALID, "%s: not a regular file", setting);
    char *text = calloc(1, KLD_SECRET_BYTES_MAX + 2);
    if (!text)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    ssize_t bytes = read_all(fd, text, KLD_SECRET_BYTES_MAX + 1);
    enum kld_status status = KLD_OK;
    if (bytes < 0)
        status = kld_error_set(err, KLD_INVALID, "%s: the file cannot be read: %s", setting,
                               strerror(errno));
    else if ((size_t)bytes > KLD_SECRET_BYTES_MAX)
        status = kld_error_set(err, KLD_TOO_LARGE, "%s: the file has more than %zu bytes", setting,
                               KLD_SECRET_BYTES_MAX);
    else if (memchr(text, '\0', (size_t)bytes))
        status = kld_error_set(err, KLD_INVALID, "%s: the file is not text", setting);
    if (status) {
        explicit_bzero(text, KLD_SECRET_BYTES_MAX + 2);
        free(text);
        return status;
    }
    *ret_text = text;
    return KLD_OK;
}

/* A pipe at the path is refused, and nobody waits for its other end. */
static enum kld_status read_file(const char *setting, const char *path, char **ret_text,
                                 struct kld_error *err) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return kld_error_set(err, KLD_INVALID, "%s: the file cannot be opened: %s (%.100s)",
                             setting, strerror(errno), path);
    enum kld_status status = read_text(setting, fd, ret_text, err);
    close(fd);
    return status;
}

enum kld_status kld_secrets_check(const struct kld_config *config, struct kld_error *err) {
    if (!config->tls_cert[0] != !config->tls_key[0] ||
        (config->tls_client_ca[0] && !config->tls_cert[0]))
        return kld_error_set(err, KLD_INVALID,
                             "tls_cert and tls_key go together, and tls_client_ca with them");
    return KLD_OK;
}

enum kld_status kld_secrets_read(const struct kld_config *config, struct kld_secrets *ret_secrets,
                                 struct kld_error *err) {
    struct kld_secrets secrets = {.tokens = NULL};
    enum kld_status status = kld_secrets_check(config, err);
#define X(setting)                                                                                 \
    if (status == KLD_OK && config->setting[0])                                                    \
        status = read_file(#setting, config->setting, &secrets.setting, err);
    KLD_SECRET_MAP(X)
#undef X
    if (status) {
        kld_secrets_forget(&secrets);
        return status;
    }
    *ret_secrets = secrets;
    return KLD_OK;
}

static bool write_all(int fd, const void *from, size_t bytes) {
    size_t written = 0;
    while (written < bytes) {
        ssize_t step = write(fd, (const char *)from + written, bytes - written);
        if (step < 0 && errno != EINTR)
            return false;
        written += step > 0 ? (size_t)step : 0;
    }
    return true;
}

enum kld_status kld_secrets_pack(const struct kld_secrets *secrets, int *ret_fd,
                                 struct kld_error *err) {
    struct kld_secrets copy = *secrets;
    struct head head;
    memset(&head, 0, sizeof head);
    for (size_t i = 0; i < SETTINGS; i++) {
        const char *text = *text_of(&copy, i);
        head.given[i] = text != NULL;
        head.bytes[i] = text ? (uint32_t)strlen(text) : 0;
    }
    int fd = memfd_create("kld-secrets", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    bool done = fd >= 0 && write_all(fd, &head, sizeof head);
    for (size_t i = 0; i < SETTINGS && done; i++)
        done = !head.given[i] || write_all(fd, *text_of(&copy, i), head.bytes[i]);
    if (!done || fcntl(fd, F_ADD_SEALS, SEALS) != 0) {
        enum kld_status status = kld_error_set(
            err, KLD_NO_MEMORY, "no memory to hand files to the gateway: %s", strerror(errno));
        if (fd >= 0)
            close(fd);
        return status;
    }
    *ret_fd = fd;
    return KLD_OK;
}

enum kld_status kld_secrets_unpack(int fd, struct kld_secrets *ret_secrets, struct kld_error *err) {
    struct kld_secrets secrets = {.tokens = NULL};
    struct head head;
    off_t at = sizeof head;
    bool done = pread(fd, &head, sizeof head, 0) == (ssize_t)sizeof head;
    for (size_t i = 0; i < SETTINGS && done; i++) {
        char **text = text_of(&secrets, i);
        if (!head.given[i])
            continue;
        done = head.bytes[i] <= KLD_SECRET_BYTES_MAX &&
               (*text = calloc(1, (size_t)head.bytes[i] + 1)) != NULL &&
               pread(fd, *text, head.bytes[i], at) == (ssize_t)head.bytes[i];
        at += (off_t)head.bytes[i];
    }
    if (!done) {
        kld_secrets_forget(&secrets);
        return kld_error_set(err, KLD_INTERNAL,
                             "the supervisor's files cannot be taken over (out of memory?)");
    }
    *ret_secrets = secrets;
    return KLD_OK;
}

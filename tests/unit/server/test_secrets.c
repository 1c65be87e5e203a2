/* test_secrets.c - files on their way from the supervisor to the gateway. */
#include "server/secrets.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/unit/unit.h"

static struct kld_config config;
static struct kld_secrets secrets;
static struct kld_error err;
static char folder[] = "/tmp/kld-test-secrets-XXXXXX";

static void path_of(char path[KLD_CONFIG_TEXT_MAX], const char *name) {
    snprintf(path, KLD_CONFIG_TEXT_MAX, "%s/%s", folder, name);
}

static void write_file(char path[KLD_CONFIG_TEXT_MAX], const char *name, const char *text,
                       size_t bytes) {
    path_of(path, name);
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(text, 1, bytes, file), bytes);
    ck_assert_int_eq(fclose(file), 0);
}

static void begin(void) { ck_assert_ptr_nonnull(mkdtemp(folder)); }

static void end(void) {
    const char *const paths[] = {config.tokens, config.tls_cert, config.tls_key};
    for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++)
        if (paths[i][0])
            unlink(paths[i]);
    rmdir(folder);
}

START_TEST(what_goes_in_comes_out) {
    int fd;
    struct kld_secrets got;
    begin();
    write_file(config.tokens, "tokens", "", 0);
    write_file(config.tls_cert, "cert", "certificate\n", 12);
    write_file(config.tls_key, "key", "the key", 7);
    ck_assert_int_eq(kld_secrets_read(&config, &secrets, &err), KLD_OK);
    ck_assert_int_eq(kld_secrets_pack(&secrets, &fd, &err), KLD_OK);
    kld_secrets_forget(&secrets);
    ck_assert_ptr_null(secrets.tls_key);
    write_file(config.tls_key, "key", "another", 7); /* comes too late */
    for (int i = 0; i < 2; i++) {                    /* as often as a gateway is started */
        ck_assert_int_eq(kld_secrets_unpack(fd, &got, &err), KLD_OK);
        ck_assert_str_eq(got.tokens, "");
        ck_assert_str_eq(got.tls_cert, "certificate\n");
        ck_assert_str_eq(got.tls_key, "the key");
        ck_assert_ptr_null(got.tls_client_ca);
        kld_secrets_forget(&got);
    }
    ck_assert_int_lt(pwrite(fd, "x", 1, 0), 0); /* nobody changes it */
    ck_assert_int_lt(ftruncate(fd, 0), 0);
    close(fd);
    end();
}
END_TEST

static void refused(enum kld_status status, const char *part) {
    ck_assert_int_eq(kld_secrets_read(&config, &secrets, &err), status);
    if (!strstr(err.text, part))
        ck_abort_msg("'%s' does not hold '%s'", err.text, part);
}

START_TEST(files_that_are_none) {
    begin();
    path_of(config.tokens, "none");
    refused(KLD_INVALID, "tokens: the file cannot be opened: No such file");
    strcpy(config.tokens, "/tmp");
    refused(KLD_INVALID, "tokens: not a regular file");
    path_of(config.tokens, "pipe"); /* whose other end would be waited for */
    ck_assert_int_eq(mkfifo(config.tokens, 0600), 0);
    refused(KLD_INVALID, "tokens: not a regular file");
    unlink(config.tokens);
    write_file(config.tokens, "tokens", "a\0b", 3);
    refused(KLD_INVALID, "tokens: the file is not text");
    static char large[KLD_SECRET_BYTES_MAX + 1];
    memset(large, 'a', sizeof large);
    write_file(config.tokens, "tokens", large, sizeof large);
    refused(KLD_TOO_LARGE, "tokens: the file has more than 1048576 bytes");
    write_file(config.tokens, "tokens", large, sizeof large - 1);
    ck_assert_int_eq(kld_secrets_read(&config, &secrets, &err), KLD_OK);
    ck_assert_uint_eq(strlen(secrets.tokens), KLD_SECRET_BYTES_MAX);
    kld_secrets_forget(&secrets);
    end();
}
END_TEST

START_TEST(settings_that_go_together) {
    begin();
    write_file(config.tls_cert, "cert", "x", 1);
    refused(KLD_INVALID, "go together");
    unlink(config.tls_cert);
    config.tls_cert[0] = '\0';
    strcpy(config.tls_client_ca, "/tmp");
    refused(KLD_INVALID, "go together");
    end();
}
END_TEST

START_TEST(what_is_no_memfd_of_ours) {
    int fd = memfd_create("test", 0);
    uint32_t head[8] = {1, 0, 0, 0, 100};
    ck_assert_int_eq(kld_secrets_unpack(fd, &secrets, &err), KLD_INTERNAL);
    ck_assert_int_eq(write(fd, head, sizeof head), sizeof head);
    ck_assert_int_eq(kld_secrets_unpack(fd, &secrets, &err), KLD_INTERNAL);
    ck_assert_int_eq(kld_secrets_unpack(-1, &secrets, &err), KLD_INTERNAL);
    close(fd);
}
END_TEST

UNIT_MAIN("server/secrets", what_goes_in_comes_out, files_that_are_none, settings_that_go_together,
          what_is_no_memfd_of_ours)

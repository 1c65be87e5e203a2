/* test_tls.c - keys that are read, refused and replaced while connections take them. Certificates
 * are made here. What a handshake sees of them is in tests/e2e/test_reload.py. */
#include "server/gateway/tls.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <gnutls/gnutls.h>
#include <gnutls/x509.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/unit/unit.h"

static struct kld_error err;

/* Signed by itself, for so many seconds. */
static void make(char **ret_certificate, char **ret_key, int64_t seconds) {
    gnutls_x509_privkey_t key;
    gnutls_x509_crt_t certificate;
    gnutls_datum_t text;
    unsigned char serial = 1;
    gnutls_x509_privkey_init(&key);
    ck_assert_int_eq(gnutls_x509_privkey_generate(
                         key, GNUTLS_PK_ECDSA, GNUTLS_CURVE_TO_BITS(GNUTLS_ECC_CURVE_SECP256R1), 0),
                     0);
    gnutls_x509_crt_init(&certificate);
    gnutls_x509_crt_set_version(certificate, 3);
    gnutls_x509_crt_set_dn_by_oid(certificate, GNUTLS_OID_X520_COMMON_NAME, 0, "test", 4);
    gnutls_x509_crt_set_serial(certificate, &serial, sizeof serial);
    gnutls_x509_crt_set_activation_time(certificate, time(NULL) - 60);
    gnutls_x509_crt_set_expiration_time(certificate, time(NULL) + seconds);
    ck_assert_int_eq(gnutls_x509_crt_set_key(certificate, key), 0);
    ck_assert_int_eq(gnutls_x509_crt_sign2(certificate, certificate, key, GNUTLS_DIG_SHA256, 0), 0);
    gnutls_x509_crt_export2(certificate, GNUTLS_X509_FMT_PEM, &text);
    *ret_certificate = strdup((char *)text.data);
    gnutls_free(text.data);
    gnutls_x509_privkey_export2(key, GNUTLS_X509_FMT_PEM, &text);
    *ret_key = strdup((char *)text.data);
    gnutls_free(text.data);
    gnutls_x509_crt_deinit(certificate);
    gnutls_x509_privkey_deinit(key);
}

static struct kld_secrets first, second;

static void make_both(void) {
    make(&first.tls_cert, &first.tls_key, 1000);
    make(&second.tls_cert, &second.tls_key, 5000);
}

static void forget_both(void) {
    kld_secrets_forget(&first);
    kld_secrets_forget(&second);
}

START_TEST(a_connection_keeps_its_keys) {
    struct kld_tls *tls;
    struct kld_tls_keys *next;
    make_both();
    ck_assert_int_eq(kld_tls_open(&first, &tls, &err), KLD_OK);
    ck_assert(!kld_tls_wants_certificates(tls));
    struct kld_tls_keys *old = kld_tls_acquire(tls);
    ck_assert_int_eq(kld_tls_read(tls, &second, &next, &err), KLD_OK);
    time_t later = kld_tls_until(next) - kld_tls_until(old); /* they are not made at once */
    ck_assert(later >= 4000 && later < 4060);
    kld_tls_replace(tls, next);
    struct kld_tls_keys *new = kld_tls_acquire(tls);
    ck_assert_ptr_eq(new, next);
    ck_assert_ptr_ne(new, old);
    ck_assert_int_gt(kld_tls_until(old), time(NULL)); /* still there */
    kld_tls_release(new);
    kld_tls_release(old);
    kld_tls_close(tls);
    forget_both();
}
END_TEST

START_TEST(what_does_not_fit_is_refused) {
    struct kld_tls *tls, *plain;
    struct kld_tls_keys *next;
    make_both();
    struct kld_secrets mixed = {.tls_cert = first.tls_cert, .tls_key = second.tls_key};
    struct kld_secrets with_ca = first, bad_ca = first, none = {.tokens = NULL};
    with_ca.tls_client_ca = second.tls_cert;
    bad_ca.tls_client_ca = second.tls_key;
    ck_assert_int_eq(kld_tls_open(&mixed, &tls, &err), KLD_INVALID);
    ck_assert_int_eq(kld_tls_open(&bad_ca, &tls, &err), KLD_INVALID);
    ck_assert_int_eq(kld_tls_open(&first, &tls, &err), KLD_OK);
    ck_assert_int_eq(kld_tls_read(tls, &mixed, &next, &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "tls_cert, tls_key"));
    ck_assert_int_eq(kld_tls_read(tls, &with_ca, &next, &err), KLD_INVALID);
    ck_assert_int_eq(kld_tls_read(tls, &none, &next, &err), KLD_INVALID);
    kld_tls_close(tls);
    ck_assert_int_eq(kld_tls_open(&with_ca, &tls, &err), KLD_OK);
    ck_assert(kld_tls_wants_certificates(tls));
    ck_assert_int_eq(kld_tls_read(tls, &first, &next, &err), KLD_INVALID);
    ck_assert_int_eq(kld_tls_read(tls, &bad_ca, &next, &err), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "tls_client_ca"));
    kld_tls_close(tls);
    ck_assert_int_eq(kld_tls_open(&none, &plain, &err), KLD_OK);
    ck_assert_ptr_null(plain);
    ck_assert(!kld_tls_wants_certificates(plain));
    ck_assert_int_eq(kld_tls_read(plain, &first, &next, &err), KLD_INVALID);
    ck_assert_int_eq(kld_tls_read(plain, &none, &next, &err), KLD_OK);
    kld_tls_replace(plain, next);
    forget_both();
}
END_TEST

static atomic_bool taking;

static void *take_all_the_time(void *user) {
    struct kld_tls *tls = user;
    while (atomic_load(&taking)) {
        struct kld_tls_keys *keys = kld_tls_acquire(tls);
        if (kld_tls_until(keys) < time(NULL)) /* of freed memory, say */
            return user;
        kld_tls_release(keys);
    }
    return NULL;
}

START_TEST(keys_are_replaced_under_who_takes_them) {
    pthread_t taker[3];
    struct kld_tls *tls;
    struct kld_tls_keys *next;
    void *result;
    make_both();
    ck_assert_int_eq(kld_tls_open(&first, &tls, &err), KLD_OK);
    atomic_store(&taking, true);
    for (int i = 0; i < 3; i++)
        ck_assert_int_eq(pthread_create(&taker[i], NULL, take_all_the_time, tls), 0);
    for (int i = 0; i < 200; i++) {
        ck_assert_int_eq(kld_tls_read(tls, i % 2 ? &first : &second, &next, &err), KLD_OK);
        kld_tls_replace(tls, next);
    }
    atomic_store(&taking, false);
    for (int i = 0; i < 3; i++) {
        pthread_join(taker[i], &result);
        ck_assert_ptr_null(result);
    }
    kld_tls_close(tls);
    forget_both();
}
END_TEST

static __thread bool refusing;
static atomic_bool is_ours; /* calloc(); not where valgrind or ThreadSanitizer has its own */

#ifndef __SANITIZE_THREAD__
static bool is_for_random_numbers(void) {
    void *frame[8];
    Dl_info function;
    int frames = backtrace(frame, 8);
    for (int i = 0; i < frames; i++)
        if (dladdr(frame[i], &function) && function.dli_sname &&
            strcmp(function.dli_sname, "gnutls_rnd") == 0)
            return true;
    return false;
}

/* In the place of libc's, whichever that is. */
__attribute__((visibility("default"))) void *calloc(size_t count, size_t bytes) {
    static void *(*_Atomic real)(size_t, size_t);
    if (!real)
        real = (void *(*)(size_t, size_t))dlsym(RTLD_NEXT, "calloc");
    bool refused = false;
    is_ours = true;
    if (refusing) {
        refusing = false; /* of what looking itself needs */
        refused = is_for_random_numbers();
        refusing = true;
    }
    return refused ? NULL : real(count, bytes);
}
#endif

struct reader {
    const struct kld_tls *tls;
    enum kld_status status;
};

/* In a thread of its own, for whose random numbers GnuTLS needs memory. */
static void *read_without_memory(void *user) {
    struct kld_tls_keys *next;
    struct reader *reader = user;
    refusing = true;
    reader->status = kld_tls_read(reader->tls, &second, &next, &err);
    refusing = false;
    if (reader->status == KLD_OK)
        kld_tls_release(next);
    return NULL;
}

static volatile sig_atomic_t asked_to_end;

static void note_signal(int number) { asked_to_end++; }

START_TEST(what_gnutls_does_not_survive_ends_the_process) {
    struct kld_tls *tls;
    struct reader at;
    make_both();
    signal(SIGTERM, note_signal);
    ck_assert_int_eq(kld_tls_open(&first, &tls, &err), KLD_OK);
    at.tls = tls;
    ck_assert(!kld_tls_end_if_broken(tls, true));
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, read_without_memory, &at), 0);
    pthread_join(thread, NULL);
    if (is_ours) {
        ck_assert(kld_tls_end_if_broken(tls, true));
        ck_assert_int_ne(at.status, KLD_OK); /* it is not said to be in use */
        ck_assert_int_eq(asked_to_end, 0);
        ck_assert(kld_tls_end_if_broken(tls, false));
        ck_assert_int_eq(asked_to_end, 1);
    }
    ck_assert(!kld_tls_end_if_broken(NULL, false));
    kld_tls_close(tls);
    forget_both();
}
END_TEST

UNIT_MAIN("tls", a_connection_keeps_its_keys, what_does_not_fit_is_refused,
          keys_are_replaced_under_who_takes_them, what_gnutls_does_not_survive_ends_the_process)

/* test_config.c - flags, environment, file; precedence; what is refused. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "server/config.h"
#include "tests/unit/unit.h"

static struct kld_config config;
static enum kld_config_action action;
static struct kld_error err;

/* Flags and environment as NULL-terminated lists. */
static enum kld_status parse(const char *const *flags, const char *const *environment) {
    static const char *const none[] = {NULL};
    int count = 0;
    while (flags && flags[count])
        count++;
    return kld_config_parse(count, (char *const *)(flags ? flags : none),
                            (char *const *)(environment ? environment : none), &config, &action,
                            &err);
}
#define FLAGS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void fails(const char *const *flags, const char *text) {
    memset(&config, 0x5a, sizeof config);
    struct kld_config before = config;
    ck_assert_int_eq(parse(flags, NULL), KLD_INVALID);
    if (!strstr(err.text, text))
        ck_abort_msg("'%s' does not hold '%s'", err.text, text);
    ck_assert_int_eq(memcmp(&before, &config, sizeof config), 0); /* set only on success */
}

/* A file with this text; its name stays valid until the next call. */
static const char *file_with(const char *text) {
    static char path[64];
    snprintf(path, sizeof path, "/tmp/kld-test-config-%d.json", (int)getpid());
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    fputs(text, file);
    fclose(file);
    return path;
}

START_TEST(defaults) {
    ck_assert_int_eq(parse(NULL, NULL), KLD_OK);
    ck_assert_int_eq(action, KLD_CONFIG_RUN);
    ck_assert_str_eq(config.http, "127.0.0.1:8080");
    ck_assert_str_eq(config.backend, "auto");
    ck_assert_uint_eq(config.unix_mode, 0660);
    ck_assert_uint_eq(config.staging_bytes_max, UINT64_C(1) << 30);
    ck_assert(!config.insecure_bind);
}
END_TEST

START_TEST(both_spellings_of_a_flag) {
    ck_assert_int_eq(parse(FLAGS("--log-level", "warn", "--http=", "--insecure-bind",
                                 "--region-bytes-max=3m", "--unix-mode=0600"),
                           NULL),
                     KLD_OK);
    ck_assert_str_eq(config.log_level, "warn");
    ck_assert_str_eq(config.http, "");
    ck_assert(config.insecure_bind);
    ck_assert_uint_eq(config.region_bytes_max, UINT64_C(3) << 20);
    ck_assert_uint_eq(config.unix_mode, 0600);
    ck_assert_int_eq(parse(FLAGS("--insecure-bind=false", "--device=1", "--device=2"), NULL),
                     KLD_OK);
    ck_assert(!config.insecure_bind);
    ck_assert_str_eq(config.device, "2"); /* the last one counts */
}
END_TEST

START_TEST(devices_are_all_or_a_list) {
    ck_assert_int_eq(parse(FLAGS("--device=all"), NULL), KLD_OK);
    ck_assert_uint_eq(kld_config_devices(&config), 0);
    ck_assert_uint_eq(kld_config_device(&config, 5), 5);
    ck_assert_int_eq(parse(FLAGS("--device=7,0,1023,0"), NULL), KLD_OK);
    ck_assert_uint_eq(kld_config_devices(&config), 4);
    const uint32_t numbers[] = {7, 0, 1023, 0};
    for (uint32_t i = 0; i < 4; i++)
        ck_assert_uint_eq(kld_config_device(&config, i), numbers[i]);
    ck_assert_int_eq(parse(FLAGS("--device=0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,15"), NULL), KLD_OK);
    ck_assert_uint_eq(kld_config_devices(&config), KLD_DEVICES_MAX);
    ck_assert_int_eq(parse(NULL, NULL), KLD_OK);
    ck_assert_uint_eq(kld_config_devices(&config), 1);
    static const char *const wrong[] = {"--device=",
                                        "--device=+1",
                                        "--device= 1",
                                        "--device=1K",
                                        "--device=1024",
                                        "--device=1,,2",
                                        "--device=,1",
                                        "--device=1,",
                                        "--device=all,1",
                                        "--device=00001",
                                        "--device=0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0"};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        fails(FLAGS(wrong[i]), "neither all nor 1 to 16 numbers");
}
END_TEST

START_TEST(precedence) {
    const char *path = file_with("{\"device\": 1, \"threads\": 1, \"spin_us\": 1}");
    char variable[80];
    snprintf(variable, sizeof variable, "KLD_CONFIG=%s", path);
    ck_assert_int_eq(
        parse(FLAGS("--spin-us=3"), FLAGS(variable, "KLD_THREADS=2", "KLD_SPIN_US=2", "OTHER=x")),
        KLD_OK);
    unlink(path);
    ck_assert_str_eq(config.device, "1");
    ck_assert_uint_eq(config.threads, 2);
    ck_assert_uint_eq(config.spin_us, 3);
}
END_TEST

START_TEST(refuses_flags) {
    fails(FLAGS("--lgo-level=info"), "did you mean --log-level?");
    fails(FLAGS("--drain"), "did you mean --drain-ms?");
    fails(FLAGS("--log_level=info"), "did you mean --log-level?");
    fails(FLAGS("--xyzzy=1"), "--help lists all");
    fails(FLAGS("--"), "unexpected argument '--'");
    fails(FLAGS("-x"), "unexpected argument");
    fails(FLAGS("--device"), "--device needs a value");
    fails(FLAGS("--user-publications-max=4097"), "'4097' is not a whole number from 1 to 4096");
    fails(FLAGS("--client-requests-max=65537"), "'65537' is not a whole number from 1 to 65536");
    fails(FLAGS("--client-streams-max=1025"), "'1025' is not a whole number from 1 to 1024");
    fails(FLAGS("--client-streams-max=0"), "whole number from 1 to 1024");
    fails(FLAGS("--worker-wait-ms=0"), "'0' is not a whole number from 1 to 3600000");
    fails(FLAGS("--cuda-files-max=0"), "whole number from 1");
    fails(FLAGS("--threads="), "'' is not a whole number");
    fails(FLAGS("--threads=+1"), "whole number");
    fails(FLAGS("--threads= 1"), "whole number");
    fails(FLAGS("--threads=1K"), "whole number");
    fails(FLAGS("--clients-max=4294967296"), "from 1 to 4294967295");
    fails(FLAGS("--clients-max=99999999999999999999999"), "from 1 to");
    fails(FLAGS("--unix-mode=0888"), "from 0 to 511");
    fails(FLAGS("--unix-mode=660"), "from 0 to 511"); /* decimal: somebody meant octal */
    fails(FLAGS("--body-bytes-max=8388608T"), "K, M, G, T");
    fails(FLAGS("--body-bytes-max=1KB"), "K, M, G, T");
    fails(FLAGS("--log-level=loud"), "not one of debug,info,warn,error");
    fails(FLAGS("--log-level=debug,info"), "not one of");
    fails(FLAGS("--allow-uids=1,,2"), "numbers separated by commas");
    fails(FLAGS("--allow-uids=1,"), "numbers separated by commas");
    fails(FLAGS("--allow-uids=4294967295"), "less than 4294967295");
    char longer[KLD_CONFIG_TEXT_MAX + 16];
    memset(longer, 'x', sizeof longer);
    memcpy(longer, "--unix=", 7);
    longer[sizeof longer - 1] = '\0';
    fails(FLAGS(longer), "longer than 255 bytes");
    memcpy(longer, "--", 2); /* an unknown name of any length */
    longer[6] = 'x';
    fails(FLAGS(longer), "unknown option");
}
END_TEST

START_TEST(refuses_environment) {
    ck_assert_int_eq(parse(NULL, FLAGS("KLD_DRAIN_MS=soon")), KLD_INVALID);
    ck_assert_ptr_nonnull(strstr(err.text, "KLD_DRAIN_MS: 'soon'"));
    ck_assert_int_eq(parse(NULL, FLAGS("KLD_CONFIG=/nonexistent")), KLD_INVALID);
}
END_TEST

START_TEST(variables_that_are_nobodys) {
    static const struct {
        const char *assignment, *similar; /* NULL: nothing is said of it */
    } cases[] = {
        {"KLD_LGO_LEVEL=info", "KLD_LOG_LEVEL"},
        {"KLD_DRAIN=1", "KLD_DRAIN_MS"},
        {"KLD_SHARED_BYTE_MAX=1G", "KLD_SHARED_BYTES_MAX"},
        {"KLD_log_level=info", "KLD_LOG_LEVEL"},
        {"KLD_XYZZY=1", ""},
        {"KLD_=1", ""},
        {"KLD_LOG_LEVEL=info", NULL},
        {"KLD_CONFIG=/x", NULL},
        {"KLD_SERVER=unix:/x", NULL},
        {"KLD_LIBRARY=/x", NULL},
        {"KLD_TEST_FAULTS=1", NULL},
        {"KLD_PORT=tcp://10.0.0.1:8080", NULL},
        {"KLD_PORT_8080_TCP_ADDR=10.0.0.1", NULL},
        {"KLD_SERVICE_HOST=10.0.0.1", NULL},
        {"KLD_GPU_SERVICE_PORT_HTTP=80", NULL},
        {"KLD_GPU_PORT=tcp://10.0.0.1:80", NULL},
        {"KLD_GPU_PORT_80_TCP=tcp://10.0.0.1:80", NULL},
        {"KLDLOG=1", NULL},
        {"PATH=/bin", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char name[KLD_CONFIG_NAME_MAX], similar[160];
        bool stray = kld_config_stray_variable(cases[i].assignment, name, similar, sizeof similar);
        ck_assert_msg(stray == (cases[i].similar != NULL), "%s", cases[i].assignment);
        if (stray)
            ck_assert_str_eq(similar, cases[i].similar);
    }
}
END_TEST

START_TEST(refuses_files) {
    static const struct {
        const char *text, *expected;
    } cases[] = {
        {"{\"htpp\": \"x\"}", "did you mean http"},
        {"{\"log-level\": \"info\"}", "did you mean log_level"},
        {"{\"http\": null}", "http: expected a text"},
        {"{\"device\": 0.5}", "device: expected a whole number"},
        {"{\"device\": -1}", "device: expected a whole number"},
        {"{\"body_bytes_max\": 1e300}", "expected a whole number"},
        {"{\"device\": true}", "expected a whole number"},
        {"{\"insecure_bind\": 1}", "expected true or false"},
        {"{\"device\": 1, \"device\": 1}", "is there twice"},
        {"[1]", "expected a JSON object"},
        {"", "the JSON is not valid"},
        {"{} x", "something behind the value"},
        {"{\"threads\": 010}", "the JSON is not valid"},
        {"{\"threads\": 1.}", "the JSON is not valid"},
        {"{\"tokens\": \"/a\\u0000b\"}", "\\u0000, which is not accepted"},
        {"{\"unix_mode\": 0440}", "the JSON is not valid"},
        {"{\"unix_mode\": 440}", "unix_mode: expected octal as a text, like \"0660\""},
        {"{\"unix_mode\": 432}", "expected octal as a text"},
        {"{\"unix_mode\": \"432\"}", "expected octal as a text"},
        {"{\"unix_mode\": \"0888\"}", "from 0 to 511"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        fails(FLAGS("--config", file_with(cases[i].text)), cases[i].expected);
    unlink(file_with(""));
}
END_TEST

START_TEST(a_file_may_hold_every_kind) {
    const char *path = file_with("{\"http\": \"\", \"device\": 3, \"body_bytes_max\": \"2G\", "
                                 "\"insecure_bind\": true, \"pool_bytes_max\": 4096, "
                                 "\"unix_mode\": \"0440\"} \n");
    ck_assert_int_eq(parse(FLAGS("--config", path), NULL), KLD_OK);
    unlink(path);
    ck_assert_str_eq(config.http, "");
    ck_assert_str_eq(config.device, "3");
    ck_assert_uint_eq(config.body_bytes_max, UINT64_C(2) << 30);
    ck_assert_uint_eq(config.pool_bytes_max, 4096);
    ck_assert_uint_eq(config.unix_mode, 0440);
    ck_assert(config.insecure_bind);
}
END_TEST

START_TEST(takes_the_0_that_its_help_explains) {
    int tried = 0;
    char flag[64];
#define X(TYPE, name, value, help)                                                                 \
    if (strstr(help, "0: ")) {                                                                     \
        snprintf(flag, sizeof flag, "--%s=0", #name);                                              \
        for (char *c = flag; *c; c++)                                                              \
            *c = *c == '_' ? '-' : *c;                                                             \
        ck_assert_msg(parse(FLAGS(flag), NULL) == KLD_OK, "%s: %s", flag, err.text);               \
        tried++;                                                                                   \
    }
    KLD_CONFIG_MAP(X)
#undef X
    ck_assert_int_ge(tried, 8);
}
END_TEST

START_TEST(help_and_version_win) {
    ck_assert_int_eq(parse(FLAGS("--device=1", "--help", "--nonsense"), NULL), KLD_OK);
    ck_assert_int_eq(action, KLD_CONFIG_HELP);
    ck_assert_int_eq(parse(FLAGS("--version"), NULL), KLD_OK);
    ck_assert_int_eq(action, KLD_CONFIG_VERSION);
    ck_assert_int_eq(parse(FLAGS("--help-metrics"), NULL), KLD_OK);
    ck_assert_int_eq(action, KLD_CONFIG_METRICS);
    ck_assert_int_eq(parse(FLAGS("--measure-roofline", "--roofline-bytes-per-s=4T"), NULL), KLD_OK);
    ck_assert(config.measure_roofline);
    ck_assert_uint_eq(config.roofline_bytes_per_s, UINT64_C(4) << 40);
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    kld_config_help(out);
    fclose(out);
#define X(TYPE, name, value, help) ck_assert_ptr_nonnull(strstr(text, help));
    KLD_CONFIG_MAP(X)
#undef X
    free(text);
}
END_TEST

/* What the supervisor hands to a child comes out the same. */
START_TEST(arguments_are_the_whole_configuration) {
    ck_assert_int_eq(parse(FLAGS("--http=[::1]:0", "--unix=/tmp/a b=c", "--insecure-bind",
                                 "--region-bytes-max=5", "--allow-uids=0,7"),
                           NULL),
                     KLD_OK);
    struct kld_config before = config;
    char **arguments = kld_config_arguments(&before);
    ck_assert_ptr_nonnull(arguments);
    ck_assert_int_eq(parse((const char *const *)arguments, NULL), KLD_OK);
    ck_assert_int_eq(memcmp(&before, &config, sizeof config), 0);
    kld_config_arguments_free(arguments);
    kld_config_arguments_free(NULL);
}
END_TEST

START_TEST(what_a_running_server_takes_over) {
    char kept[64];
    ck_assert_int_eq(parse(FLAGS("--tokens=/a", "--log-level=info", "--clients-max=3"), NULL),
                     KLD_OK);
    struct kld_config running = config;
    kld_config_adopt(&running, &config, kept, sizeof kept);
    ck_assert_str_eq(kept, "");
    ck_assert_int_eq(parse(FLAGS("--tokens=/b", "--log-level=debug", "--clients-max=4",
                                 "--insecure-bind", "--tls-cert=/c"),
                           NULL),
                     KLD_OK);
    kld_config_adopt(&running, &config, kept, sizeof kept);
    ck_assert_str_eq(kept, "insecure_bind,clients_max,tls_cert"); /* TLS is not turned on */
    ck_assert_str_eq(running.tokens, "/b");
    ck_assert_str_eq(running.log_level, "debug");
    ck_assert_str_eq(running.tls_cert, "");
    ck_assert_uint_eq(running.clients_max, 3);
    ck_assert(!running.insecure_bind);
    ck_assert_int_eq(parse(NULL, NULL), KLD_OK);
    kld_config_adopt(&running, &config, kept, sizeof kept);
    ck_assert_str_eq(kept, "clients_max,tokens"); /* nor tokens off */
    ck_assert_str_eq(running.tokens, "/b");
    char few[24];
    ck_assert_int_eq(
        parse(FLAGS("--threads=1", "--spin-us=1", "--clients-max=1", "--drain-ms=1"), NULL),
        KLD_OK);
    kld_config_adopt(&running, &config, few, sizeof few);
    ck_assert_str_eq(few, "threads,spin_us,...");
}
END_TEST

UNIT_MAIN("server/config", what_a_running_server_takes_over, defaults, both_spellings_of_a_flag,
          devices_are_all_or_a_list, precedence, refuses_flags, refuses_environment,
          variables_that_are_nobodys, refuses_files, a_file_may_hold_every_kind,
          takes_the_0_that_its_help_explains, help_and_version_win,
          arguments_are_the_whole_configuration)

/* config.c - settings from flags, environment and a JSON file, checked against one table.
 * Reads the file named by --config; opens nothing else, logs nothing. Main thread, at start;
 * of the supervisor uv's pool, too, when it reads all again. */
#include "server/config.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/number.h"
#include "proto/oip_json.h"

#define FILE_BYTES_MAX (1 << 20)

enum type { TYPE_TEXT, TYPE_COUNT, TYPE_BYTES, TYPE_FLAG, TYPE_DEVICES };

struct setting {
    const char *name;
    enum type type;
    size_t offset;
    const char *value, *help;
};

static const struct setting settings[] = {
#define X(TYPE, name, value, help)                                                                 \
    {#name, TYPE_##TYPE, offsetof(struct kld_config, name), value, help},
    KLD_CONFIG_MAP(X)
#undef X
};
#define SETTINGS (sizeof settings / sizeof settings[0])

/* Settings that are a choice, and numbers with a range of their own. Every other number is at least
 * 1; every other COUNT fits 32 bits. */
static const struct {
    const char *name, *choices;
} choices[] = {
    {"backend", "auto,cpu,cuda"},
    {"log_level", "debug,info,warn,error"},
    {"log_format", "text,json"},
};
static const struct {
    const char *name;
    uint64_t min, max;
} ranges[] = {
    {"threads", 0, 1024},
    {"spin_us", 0, 1000000},
    {"roofline_bytes_per_s", 0, UINT64_MAX >> 1},
    {"unix_mode", 0, 0777},
    {"drain_ms", 0, 3600000},
    {"stuck_ms", 0, 3600000},
    {"start_ms", 0, 3600000},
    {"restart_ms_max", 1, 3600000},
    {"worker_wait_ms", 1, 3600000},
    {"shared_bytes_max", 0, UINT64_MAX >> 1},
    {"client_shared_bytes_max", 0, UINT64_MAX >> 1},
    {"pool_bytes_max", 0, UINT64_MAX >> 1},
    {"client_pool_bytes_max", 0, UINT64_MAX >> 1},
    {"http_threads", 0, 64},
    {"http_spin_us", 0, 10000},
    {"http_deadline_ms", 0, UINT32_MAX},
    {"http_wait_ms", 0, 3600000},
    {"http_parting_ms", 0, 3600000},
    {"keep_buffer_ms", 0, 3600000},
    {"reload_ms", 0, 3600000},
    {"user_clients_max", 0, UINT32_MAX},
    {"user_share", 1, 100},
    {"client_requests_max", 1, KLD_CLIENT_REQUESTS_MAX},
    {"client_streams_max", 1, KLD_CLIENT_STREAMS_MAX},
    {"mappings_max", 0, UINT32_MAX},
    {"user_publications_max", 1, KLD_PUBLICATIONS_MAX},
};

/* ---- one value ------------------------------------------------------------------------------- */

static bool in_list(const char *list, const char *value) {
    size_t bytes = strlen(value);
    while (*list) {
        size_t item = strcspn(list, ",");
        if (item == bytes && memcmp(list, value, bytes) == 0)
            return true;
        list += item + (list[item] == ',');
    }
    return false;
}

static bool is_number_list(const char *text) {
    for (uint32_t count = 0; *text; count++) {
        size_t digits = strspn(text, "0123456789");
        if (digits == 0 || digits > 10 || strtoull(text, NULL, 10) >= UINT32_MAX ||
            count == KLD_PEER_LIST_MAX || (text[digits] && text[digits] != ','))
            return false;
        text += digits;
        if (*text == ',' && !*++text)
            return false;
    }
    return true;
}

/* 1 to KLD_DEVICES_MAX numbers by comma; *ret_number: the one at place `index`, if there is one. */
static uint32_t read_devices(const char *text, uint32_t index, uint32_t *ret_number) {
    uint32_t count = 0;
    for (const char *at = text;; at++) {
        size_t digits = strspn(at, "0123456789");
        unsigned long number = strtoul(at, NULL, 10);
        if (digits == 0 || digits > 4 || number > KLD_DEVICE_NUMBER_MAX || count == KLD_DEVICES_MAX)
            return 0;
        if (count++ == index)
            *ret_number = (uint32_t)number;
        at += digits;
        if (*at != ',')
            return *at ? 0 : count;
    }
}

static bool is_all(const char *devices) { return strcmp(devices, "all") == 0; }

uint32_t kld_config_devices(const struct kld_config *config) {
    uint32_t number;
    return is_all(config->device) ? 0 : read_devices(config->device, 0, &number);
}

uint32_t kld_config_device(const struct kld_config *config, uint32_t index) {
    uint32_t number = index;
    if (!is_all(config->device))
        read_devices(config->device, index, &number);
    return number;
}

static enum kld_status set_text(const struct setting *setting, const char *source,
                                const char *value, struct kld_config *config,
                                struct kld_error *err) {
    for (size_t i = 0; i < sizeof choices / sizeof choices[0]; i++)
        if (strcmp(choices[i].name, setting->name) == 0 && !in_list(choices[i].choices, value))
            return kld_error_set(err, KLD_INVALID, "%s: '%.40s' is not one of %s", source, value,
                                 choices[i].choices);
    if (strncmp(setting->name, "allow_", 6) == 0 && !is_number_list(value))
        return kld_error_set(err, KLD_INVALID,
                             "%s: expected at most %d numbers separated by commas, less than %u",
                             source, KLD_PEER_LIST_MAX, UINT32_MAX);
    uint32_t number;
    if (setting->type == TYPE_DEVICES && !is_all(value) && !read_devices(value, 0, &number))
        return kld_error_set(
            err, KLD_INVALID,
            "%s: '%.40s' is neither all nor 1 to %d numbers from 0 to %d, by comma", source, value,
            KLD_DEVICES_MAX, KLD_DEVICE_NUMBER_MAX);
    if (strlen(value) >= KLD_CONFIG_TEXT_MAX)
        return kld_error_set(err, KLD_INVALID, "%s: longer than %d bytes", source,
                             KLD_CONFIG_TEXT_MAX - 1);
    char *field = (char *)config + setting->offset;
    memset(field, 0, KLD_CONFIG_TEXT_MAX);
    memcpy(field, value, strlen(value));
    return KLD_OK;
}

static enum kld_status set_number(const struct setting *setting, const char *source,
                                  const char *value, struct kld_config *config,
                                  struct kld_error *err) {
    bool bytes = setting->type == TYPE_BYTES;
    uint64_t min = 1, max = bytes ? UINT64_MAX >> 1 : UINT32_MAX, number = 0;
    for (size_t i = 0; i < sizeof ranges / sizeof ranges[0]; i++)
        if (strcmp(ranges[i].name, setting->name) == 0) {
            min = ranges[i].min;
            max = ranges[i].max;
        }
    int base = strcmp(setting->name, "unix_mode") == 0 && value[0] == '0' ? 8 : 10;
    if (!kld_number_parse(value, base, bytes, &number) || number < min || number > max)
        return kld_error_set(err, KLD_INVALID,
                             "%s: '%.40s' is not a whole number from %llu to %llu%s", source, value,
                             (unsigned long long)min, (unsigned long long)max,
                             bytes ? " (K, M, G, T allowed)" : "");
    memcpy((char *)config + setting->offset, &number, sizeof number);
    return KLD_OK;
}

static enum kld_status set_flag(const struct setting *setting, const char *source,
                                const char *value, struct kld_config *config,
                                struct kld_error *err) {
    bool yes = in_list("true,1,yes,on", value);
    if (!yes && !in_list("false,0,no,off", value))
        return kld_error_set(err, KLD_INVALID, "%s: '%.40s' is not true or false", source, value);
    memcpy((char *)config + setting->offset, &yes, sizeof yes);
    return KLD_OK;
}

/* source: how the person wrote the setting ("--log-level", "KLD_LOG_LEVEL"). */
static enum kld_status set(const struct setting *setting, const char *source, const char *value,
                           struct kld_config *config, struct kld_error *err) {
    switch (setting->type) {
    case TYPE_TEXT:
    case TYPE_DEVICES: return set_text(setting, source, value, config, err);
    case TYPE_FLAG: return set_flag(setting, source, value, config, err);
    default: return set_number(setting, source, value, config, err);
    }
}

/* ---- names ----------------------------------------------------------------------------------- */

/* name: as in the table; '-' is read as '_' where the name came from a flag. */
static const struct setting *find(const char *name, size_t bytes, bool flag) {
    for (size_t i = 0; i < SETTINGS; i++) {
        size_t at = 0;
        while (at < bytes && settings[i].name[at] &&
               (name[at] == settings[i].name[at] ||
                (flag && name[at] == '-' && settings[i].name[at] == '_')))
            at++;
        if (at == bytes && !settings[i].name[at] && !(flag && memchr(name, '_', bytes)))
            return &settings[i];
    }
    return NULL;
}

static enum kld_status unknown(const char *what, const char *name, bool flag,
                               struct kld_error *err) {
    char bare[KLD_CONFIG_NAME_MAX], close[160];
    snprintf(bare, sizeof bare, "%s", name);
    kld_config_similar(bare, flag ? kld_config_flag_name : NULL, close, sizeof close);
    if (*close)
        return kld_error_set(err, KLD_INVALID, "unknown %s '%s%.40s'; did you mean %s?", what,
                             flag ? "--" : "", bare, close);
    return kld_error_set(err, KLD_INVALID, "unknown %s '%s%.40s'; --help lists all of them", what,
                         flag ? "--" : "", bare);
}

/* ---- sources --------------------------------------------------------------------------------- */

static enum kld_status read_key(const cJSON *item, const char *path, struct kld_config *config,
                                struct kld_error *err) {
    const struct setting *setting = find(item->string, strlen(item->string), false);
    char source[2 * KLD_CONFIG_NAME_MAX + 8], what[KLD_CONFIG_NAME_MAX + 16], number[32];
    snprintf(what, sizeof what, "key in %.40s", path);
    if (!setting)
        return unknown(what, item->string, false, err);
    snprintf(source, sizeof source, "%.40s: %s", path, setting->name);
    bool text = cJSON_IsString(item), digits = cJSON_IsNumber(item), flag = cJSON_IsBool(item);
    switch (setting->type) {
    case TYPE_TEXT:
        if (text)
            return set(setting, source, item->valuestring, config, err);
        return kld_error_set(err, KLD_INVALID, "%s: expected a text", source);
    case TYPE_FLAG:
        if (flag)
            return set(setting, source, cJSON_IsTrue(item) ? "true" : "false", config, err);
        return kld_error_set(err, KLD_INVALID, "%s: expected true or false", source);
    default:
        /* Octal is no number of JSON, and without its 0 it would be read as another one. */
        if (strcmp(setting->name, "unix_mode") == 0 && !(text && item->valuestring[0] == '0'))
            return kld_error_set(err, KLD_INVALID, "%s: expected octal as a text, like \"0660\"",
                                 source);
        if (text) /* "1G" */
            return set(setting, source, item->valuestring, config, err);
        /* A JSON number is a double: exact up to 2^53. */
        if (!digits || item->valuedouble < 0 || item->valuedouble > 9007199254740992.0 ||
            item->valuedouble != (double)(uint64_t)item->valuedouble)
            return kld_error_set(err, KLD_INVALID, "%s: expected a whole number", source);
        snprintf(number, sizeof number, "%llu", (unsigned long long)item->valuedouble);
        return set(setting, source, number, config, err);
    }
}

static enum kld_status read_text(const char *path, const char *text, size_t bytes,
                                 struct kld_config *config, struct kld_error *err) {
    char *strict = NULL; /* cJSON alone takes 010 for ten, and ends a text at \u0000 */
    struct kld_error wrong;
    enum kld_status status = kld_json_skeleton(text, bytes, &strict, &bytes, NULL, &wrong);
    if (status)
        return kld_error_set(err, status, "%.80s: %s", path, wrong.text);
    cJSON *root = cJSON_ParseWithLengthOpts(strict, bytes + 1, NULL, 1);
    free(strict);
    if (!root)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory reading the configuration");
    if (!cJSON_IsObject(root))
        status = kld_error_set(err, KLD_INVALID, "%.80s: expected a JSON object", path);
    for (const cJSON *item = root->child; item && status == KLD_OK; item = item->next) {
        for (const cJSON *other = item->next; other && status == KLD_OK; other = other->next)
            if (strcmp(item->string, other->string) == 0)
                status = kld_error_set(err, KLD_INVALID, "%.80s: '%.40s' is there twice", path,
                                       item->string);
        if (status == KLD_OK)
            status = read_key(item, path, config, err);
    }
    cJSON_Delete(root);
    return status;
}

/* A FIFO would have who opens it wait for its writer. */
static FILE *open_regular(const char *path, bool *ret_regular) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat info;
    *ret_regular = fd < 0 || (fstat(fd, &info) == 0 && S_ISREG(info.st_mode));
    FILE *file = fd >= 0 && *ret_regular ? fdopen(fd, "r") : NULL;
    if (fd >= 0 && !file)
        close(fd);
    return file;
}

static enum kld_status read_file(const char *path, struct kld_config *config,
                                 struct kld_error *err) {
    bool regular = true;
    FILE *file = open_regular(path, &regular);
    if (!file)
        return kld_error_set(err, KLD_INVALID, "cannot read the configuration %.80s: %s", path,
                             regular ? strerror(errno) : "not a regular file");
    char *text = malloc(FILE_BYTES_MAX + 1);
    size_t bytes = text ? fread(text, 1, FILE_BYTES_MAX + 1, file) : 0;
    enum kld_status status;
    if (!text)
        status = kld_error_set(err, KLD_NO_MEMORY, "out of memory reading the configuration");
    else if (ferror(file))
        status = kld_error_set(err, KLD_INVALID, "cannot read the configuration %.80s", path);
    else if (bytes > FILE_BYTES_MAX)
        status = kld_error_set(err, KLD_INVALID, "%.80s: larger than 1 MiB", path);
    else
        status = read_text(path, text, bytes, config, err);
    free(text);
    fclose(file);
    return status;
}

static const char *variable(char *const *environment, const char *name) {
    size_t bytes = strlen(name);
    for (; *environment; environment++)
        if (strncmp(*environment, name, bytes) == 0 && (*environment)[bytes] == '=')
            return *environment + bytes + 1;
    return NULL;
}

static enum kld_status read_environment(char *const *environment, struct kld_config *config,
                                        struct kld_error *err) {
    for (size_t i = 0; i < SETTINGS; i++) {
        char name[KLD_CONFIG_NAME_MAX];
        kld_config_variable_name(settings[i].name, name);
        const char *value = variable(environment, name);
        enum kld_status status = value ? set(&settings[i], name, value, config, err) : KLD_OK;
        if (status != KLD_OK)
            return status;
    }
    return KLD_OK;
}

/* One pass over the flags. config NULL: only looks for --config, --help and --version. */
static enum kld_status read_flags(int argc, char *const *argv, struct kld_config *config,
                                  const char **ret_file, enum kld_config_action *ret_action,
                                  struct kld_error *err) {
    const char *bare_flag = NULL; /* the one before, which has no value */
    for (int i = 0; i < argc; i++) {
        const char *flag = argv[i];
        bool help = strcmp(flag, "--help") == 0 || strcmp(flag, "-h") == 0;
        bool metrics = strcmp(flag, "--help-metrics") == 0;
        if (help || metrics || strcmp(flag, "--version") == 0) {
            *ret_action = help      ? KLD_CONFIG_HELP
                          : metrics ? KLD_CONFIG_METRICS
                                    : KLD_CONFIG_VERSION;
            return KLD_OK;
        }
        bool option = strncmp(flag, "--", 2) == 0 && flag[2];
        if (!option && bare_flag)
            return kld_error_set(err, KLD_INVALID, "unexpected argument '%.60s'; expected %s=%.60s",
                                 flag, bare_flag, flag);
        if (!option)
            return kld_error_set(err, KLD_INVALID,
                                 "unexpected argument '%.60s'; options begin with --", flag);
        const char *equals = strchr(flag, '=');
        size_t bytes = equals ? (size_t)(equals - flag) - 2 : strlen(flag) - 2;
        bool file = bytes == 6 && strncmp(flag + 2, "config", 6) == 0;
        const struct setting *setting = file ? NULL : find(flag + 2, bytes, true);
        char bare[KLD_CONFIG_NAME_MAX];
        snprintf(bare, sizeof bare, "%.*s", (int)(bytes < 47 ? bytes : 47), flag + 2);
        if (!file && !setting)
            return unknown("option", bare, true, err);
        const char *value = equals ? equals + 1 : NULL;
        bare_flag = !value && setting && setting->type == TYPE_FLAG ? flag : NULL;
        if (bare_flag)
            value = "true";
        else if (!value && i + 1 < argc)
            value = argv[++i];
        if (!value)
            return kld_error_set(err, KLD_INVALID, "--%s needs a value", bare);
        char source[KLD_CONFIG_NAME_MAX + 2];
        snprintf(source, sizeof source, "--%s", bare);
        enum kld_status status = KLD_OK;
        if (file)
            *ret_file = value;
        else if (config)
            status = set(setting, source, value, config, err);
        if (status != KLD_OK)
            return status;
    }
    return KLD_OK;
}

enum kld_status kld_config_parse(int argc, char *const *argv, char *const *environment,
                                 struct kld_config *ret_config, enum kld_config_action *ret_action,
                                 struct kld_error *err) {
    struct kld_config config;
    memset(&config, 0, sizeof config);
    enum kld_status status = KLD_OK;
    for (size_t i = 0; i < SETTINGS && status == KLD_OK; i++)
        status = set(&settings[i], settings[i].name, settings[i].value, &config, err);
    const char *file = variable(environment, "KLD_CONFIG");
    enum kld_config_action action = KLD_CONFIG_RUN;
    if (status == KLD_OK)
        status = read_flags(argc, argv, NULL, &file, &action, err);
    if (status == KLD_OK && action == KLD_CONFIG_RUN) {
        if (file && *file)
            status = read_file(file, &config, err);
        if (status == KLD_OK)
            status = read_environment(environment, &config, err);
        if (status == KLD_OK)
            status = read_flags(argc, argv, &config, &file, &action, err);
    }
    if (status != KLD_OK)
        return status;
    *ret_config = config;
    *ret_action = action;
    return KLD_OK;
}

/* ---- the other way round --------------------------------------------------------------------- */

char **kld_config_arguments(const struct kld_config *config) {
    char **arguments = calloc(SETTINGS + 1, sizeof *arguments);
    for (size_t i = 0; arguments && i < SETTINGS; i++) {
        const char *field = (const char *)config + settings[i].offset;
        char flag[KLD_CONFIG_NAME_MAX];
        uint64_t number = 0;
        bool yes = false;
        int written = -1;
        kld_config_flag_name(settings[i].name, flag);
        switch (settings[i].type) {
        case TYPE_TEXT:
        case TYPE_DEVICES: written = asprintf(&arguments[i], "%s=%s", flag, field); break;
        case TYPE_FLAG:
            memcpy(&yes, field, sizeof yes);
            written = asprintf(&arguments[i], "%s=%s", flag, yes ? "true" : "false");
            break;
        default:
            memcpy(&number, field, sizeof number);
            written = asprintf(&arguments[i], "%s=%llu", flag, (unsigned long long)number);
        }
        if (written < 0) {
            arguments[i] = NULL; /* asprintf leaves it undefined */
            kld_config_arguments_free(arguments);
            arguments = NULL;
        }
    }
    return arguments;
}

void kld_config_arguments_free(char **arguments) {
    for (size_t i = 0; arguments && arguments[i]; i++)
        free(arguments[i]);
    free(arguments);
}

/* settings.c - settings that no start can do anything with, alone or together: the same for a start
 * and for a reload, which else would promise what the next start breaks; and those that do nothing,
 * for the log of a start. Opens nothing and changes nothing; what another start may find otherwise,
 * as a file or an address in use, is not looked at. Supervisor: main thread at start, uv's pool
 * later. */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "server/log.h"
#include "server/supervisor/supervisor.h"

static enum kld_status check_backend(const struct kld_config *config, struct kld_error *err) {
#ifndef KLD_WITH_CUDA
    if (strcmp(config->backend, "cuda") == 0)
        return kld_error_set(err, KLD_INVALID,
                             "--backend: this build has no 'cuda'; it has auto and cpu");
#endif
    return KLD_OK;
}

static enum kld_status check_address(const char *flag, const char *text, int passed, bool insecure,
                                     struct kld_error *err) {
    struct kld_http_socket known;
    if (passed >= 0)
        return kld_http_socket_adopt(flag, passed, insecure, &known, err);
    return *text ? kld_http_address_check(flag, text, insecure, err) : KLD_OK;
}

/* Of "all" devices nobody knows yet how many there are: those that were passed are looked at. */
static enum kld_status check_unix(const struct kld_config *config,
                                  const struct kld_inherited *inherited, struct kld_error *err) {
    char first[KLD_CONFIG_TEXT_MAX] = "", path[KLD_CONFIG_TEXT_MAX];
    struct kld_unix_socket known;
    uint32_t devices = kld_config_devices(config);
    if (inherited->unix_socket[0] >= 0 && !*config->unix)
        kld_unix_socket_where(inherited->unix_socket[0], first);
    enum kld_status status = kld_unix_socket_path(*first ? first : config->unix, first, err);
    for (uint32_t i = 0; i < (devices ? devices : KLD_DEVICES_MAX) && !status; i++) {
        int passed = inherited->unix_socket[i];
        if (devices || passed >= 0)
            status = kld_unix_socket_name(first, i, path, err);
        if (!status && passed >= 0)
            status = kld_unix_socket_adopt(passed, path, &known, err);
    }
    return status;
}

/* name: as in the table. */
static void tell_unused(const char *name, const char *decides) {
    kld_log(KLD_LOG_WARN, "setting not used",
            "setting=%s reason=\"the service manager passed a socket, %s\"", name, decides);
}

/* The default is not taken for something that somebody wanted. */
static void tell_address(const char *name, const char *text, const char *usual, int passed,
                         const char *address) {
    char reason[KLD_ADDRESS_TEXT_MAX + 32];
    snprintf(reason, sizeof reason, "which listens on %s", address);
    if (passed >= 0 && strcmp(text, usual) != 0 && strcmp(text, address) != 0)
        tell_unused(name, reason);
}

static void tell_mode(const struct kld_supervisor *supervisor, uint64_t mode, uint64_t usual) {
    struct stat info;
    bool differs = stat(supervisor->config.unix, &info) != 0 || (info.st_mode & 0777) != mode;
    if (supervisor->inherited.unix_socket[0] >= 0 && mode != usual && differs)
        tell_unused("unix_mode", "whose mode is its own");
}

void kld_settings_tell(const struct kld_supervisor *supervisor, const struct kld_config *config,
                       char *const *environment) {
    const struct kld_inherited *inherited = &supervisor->inherited;
    char name[KLD_CONFIG_NAME_MAX], similar[160], *none[] = {NULL};
    struct kld_config usual;
    enum kld_config_action action;
    if (kld_config_parse(0, NULL, none, &usual, &action, NULL) == KLD_OK) {
        tell_address("http", config->http, usual.http, inherited->http, supervisor->http.address);
        tell_address("metrics_http", config->metrics_http, usual.metrics_http, inherited->metrics,
                     supervisor->metrics.address);
        tell_mode(supervisor, config->unix_mode, usual.unix_mode);
    }
    for (; *environment; environment++)
        if (kld_config_stray_variable(*environment, name, similar, sizeof similar))
            kld_log(KLD_LOG_WARN, "unknown variable",
                    *similar ? "name=\"%s\" did_you_mean=\"%s\"" : "name=\"%s\"", name, similar);
}

enum kld_status kld_settings_check(const struct kld_config *config,
                                   const struct kld_inherited *inherited, struct kld_error *err) {
    bool insecure = config->insecure_bind || config->tokens[0];
    bool http = *config->http || inherited->http >= 0;
    bool metrics = *config->metrics_http || inherited->metrics >= 0;
    enum kld_status status = check_backend(config, err);
    if (!status)
        status = check_unix(config, inherited, err);
    if (!status)
        status = check_address("--http", config->http, inherited->http, insecure, err);
    if (!status && metrics && !http)
        status = kld_error_set(err, KLD_INVALID, "--metrics-http: there is no --http beside it");
    if (!status)
        status = check_address("--metrics-http", config->metrics_http, inherited->metrics, insecure,
                               err);
    return status ? status : kld_secrets_check(config, err);
}

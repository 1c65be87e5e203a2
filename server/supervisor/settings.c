/* settings.c - settings that no start can do anything with, alone or together: the same for a start
 * and for a reload, which else would promise what the next start breaks. Opens nothing and changes
 * nothing; what another start may find otherwise, as a file or an address in use, is not looked at.
 * Supervisor: main thread at start, uv's pool later. */
#include <string.h>

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

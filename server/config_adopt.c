/* config_adopt.c - what of a configuration that was read again a running server takes over
 * (config.h). Compares and copies; the files themselves are others' to read. Any thread. */
#include <stdio.h>
#include <string.h>

#include "server/config.h"

static bool is_reloaded(const char *name) {
    size_t bytes = strlen(name);
    for (const char *at = KLD_CONFIG_RELOADED;; at++) {
        size_t item = strcspn(at, ",");
        if (item == bytes && memcmp(at, name, bytes) == 0)
            return true;
        at += item;
        if (!*at)
            return false;
    }
}

/* Adds the name, and where there is no room for it dots in its place. */
static void append(const char *name, char *list, size_t capacity) {
    size_t used = strlen(list), wanted = strlen(name) + (used > 0);
    if (used + wanted + sizeof ",..." <= capacity)
        snprintf(list + used, capacity - used, "%s%s", used ? "," : "", name);
    else if (used >= 3 && used + sizeof ",..." <= capacity && list[used - 1] != '.')
        memcpy(list + used, ",...", sizeof ",...");
}

/* field, next: of the setting in the two; all its bytes are set. */
static void adopt(const char *name, void *field, const void *next, size_t bytes, char *kept,
                  size_t capacity) {
    if (memcmp(field, next, bytes) == 0)
        return;
    if (is_reloaded(name) && !*(char *)field == !*(const char *)next) /* texts, all of them */
        memcpy(field, next, bytes);
    else
        append(name, kept, capacity);
}

void kld_config_adopt(struct kld_config *config, const struct kld_config *next, char *ret_kept,
                      size_t capacity) {
    ret_kept[0] = '\0';
#define X(TYPE, name, value, help)                                                                 \
    adopt(#name, &config->name, &next->name, sizeof config->name, ret_kept, capacity);
    KLD_CONFIG_MAP(X)
#undef X
}

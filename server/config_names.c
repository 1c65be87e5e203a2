/* config_names.c - how a setting is called as a flag and as a variable, which one somebody may have
 * meant, and which variables are nobody's (config.h). Pure; any thread. */
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "server/config.h"

static const char *const names[] = {
#define X(TYPE, name, value, help) #name,
    KLD_CONFIG_MAP(X)
#undef X
};
#define NAMES (sizeof names / sizeof names[0])

void kld_config_flag_name(const char *name, char ret_flag[KLD_CONFIG_NAME_MAX]) {
    snprintf(ret_flag, KLD_CONFIG_NAME_MAX, "--%s", name);
    for (char *c = ret_flag; *c; c++)
        if (*c == '_')
            *c = '-';
}

void kld_config_variable_name(const char *name, char ret_variable[KLD_CONFIG_NAME_MAX]) {
    snprintf(ret_variable, KLD_CONFIG_NAME_MAX, "KLD_%s", name);
    for (char *c = ret_variable; *c; c++)
        *c = (char)toupper((unsigned char)*c);
}

/* Edit distance, '-' and '_' being the same; enough of it to tell a slip from another word. */
static unsigned distance(const char *a, const char *b) {
    unsigned row[KLD_CONFIG_NAME_MAX];
    size_t columns = strlen(b);
    if (columns >= KLD_CONFIG_NAME_MAX)
        return KLD_CONFIG_NAME_MAX;
    for (size_t j = 0; j <= columns; j++)
        row[j] = (unsigned)j;
    for (size_t i = 0; a[i]; i++) {
        unsigned diagonal = row[0];
        row[0] = (unsigned)i + 1;
        for (size_t j = 0; j < columns; j++) {
            bool same = a[i] == b[j] || (a[i] == '-' && b[j] == '_');
            unsigned best = diagonal + !same;
            diagonal = row[j + 1];
            if (row[j] + 1 < best)
                best = row[j] + 1;
            if (diagonal + 1 < best)
                best = diagonal + 1;
            row[j + 1] = best;
        }
    }
    return row[columns];
}

void kld_config_similar(const char *name,
                        void (*write)(const char *name, char ret_text[KLD_CONFIG_NAME_MAX]),
                        char *ret_list, size_t capacity) {
    size_t bytes = strlen(name), used = 0;
    *ret_list = '\0';
    for (size_t i = 0; i < NAMES; i++) {
        bool begins = bytes >= 3 && strncmp(names[i], name, bytes) == 0;
        if (!begins && distance(name, names[i]) > 2)
            continue;
        char shown[KLD_CONFIG_NAME_MAX];
        if (write)
            write(names[i], shown);
        else
            snprintf(shown, sizeof shown, "%s", names[i]);
        if (used + strlen(shown) + 3 < capacity)
            used +=
                (size_t)snprintf(ret_list + used, capacity - used, "%s%s", used ? ", " : "", shown);
    }
}

/* What clients, Python and tests read (KLD_CONFIG is read beside the table); and what Kubernetes
 * tells each pod of services whose names begin with kld. */
static bool is_of_others(const char *name) {
    static const char *const known[] = {"CONFIG", "SERVER", "SOCKETS", "LIBRARY",         "LIB",
                                        "DONE",   "DIGITS", "BIN",     "PYTHON_INSTALLED"};
    static const char *const begins[] = {"TEST_", "EMULATE_", "PORT_", "SERVICE_"};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strcmp(name, known[i]) == 0)
            return true;
    for (size_t i = 0; i < sizeof begins / sizeof begins[0]; i++)
        if (strncmp(name, begins[i], strlen(begins[i])) == 0)
            return true;
    size_t bytes = strlen(name);
    bool port = bytes >= 5 && strcmp(name + bytes - 5, "_PORT") == 0;
    return strcmp(name, "PORT") == 0 || port || strstr(name, "_PORT_") || strstr(name, "_SERVICE_");
}

bool kld_config_stray_variable(const char *assignment, char ret_name[KLD_CONFIG_NAME_MAX],
                               char *ret_similar, size_t capacity) {
    char bare[KLD_CONFIG_NAME_MAX], variable[KLD_CONFIG_NAME_MAX];
    size_t bytes = strcspn(assignment, "=");
    if (strncmp(assignment, "KLD_", 4) != 0)
        return false;
    snprintf(ret_name, KLD_CONFIG_NAME_MAX, "%.*s", (int)(bytes < 255 ? bytes : 255), assignment);
    for (size_t i = 0; i < NAMES; i++) {
        kld_config_variable_name(names[i], variable);
        if (strcmp(variable, ret_name) == 0)
            return false;
    }
    if (is_of_others(ret_name + 4))
        return false;
    snprintf(bare, sizeof bare, "%s", ret_name + 4);
    for (char *c = bare; *c; c++)
        *c = (char)tolower((unsigned char)*c);
    kld_config_similar(bare, kld_config_variable_name, ret_similar, capacity);
    return true;
}

/* cgroup.c - see cgroup.h. */
#include "proto/cgroup.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define PATH_MAX_BYTES 4096

struct walk {
    const char *root;
    void (*visit)(const char *path, void *context);
    void *context;
};

/* A group and all around it. A container may see its own group as the root, under whatever name. */
static void visit_group(const struct walk *walk, const char *folder, const char *group,
                        const char *file) {
    char within[PATH_MAX_BYTES], path[2 * PATH_MAX_BYTES];
    snprintf(within, sizeof within, "%s", group);
    for (;;) {
        snprintf(path, sizeof path, "%s%s%s%s/%s", walk->root, folder[0] ? "/" : "", folder, within,
                 file);
        walk->visit(path, walk->context);
        char *end = strrchr(within, '/');
        if (!end)
            return;
        *end = '\0';
    }
}

/* Is it one of controllers, a list with commas? */
static bool is_among(const char *controller, const char *controllers, size_t bytes) {
    size_t length = strlen(controller);
    for (const char *at = controllers; at < controllers + bytes; at += strcspn(at, ",:") + 1)
        if (strncmp(at, controller, length) == 0 && strcspn(at, ",:") == length)
            return true;
    return false;
}

void kld_cgroup_walk(const char *groups, const char *root, const struct kld_cgroup_limit *limit,
                     void (*visit)(const char *path, void *context), void *context) {
    const struct walk walk = {root, visit, context};
    char line[PATH_MAX_BYTES];
    FILE *file = fopen(groups, "re");
    while (file && fgets(line, sizeof line, file)) { /* number:controllers:group */
        char *controllers = strchr(line, ':'),
             *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group)
            continue;
        controllers++;
        line[strcspn(line, "\n")] = '\0';
        if (group == controllers)
            visit_group(&walk, "", group + 1, limit->file[1]);
        else if (limit->file[0] &&
                 is_among(limit->controller, controllers, (size_t)(group - controllers)))
            visit_group(&walk, limit->controller, group + 1, limit->file[0]);
    }
    if (file)
        fclose(file);
}

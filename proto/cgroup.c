/* cgroup.c - see cgroup.h. */
#include "proto/cgroup.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define LINE_BYTES_MAX 4096 /* longer ones are passed over: those of layered roots may be */

struct walk {
    const char *mounts;
    const struct kld_cgroup_limit *limit;
    void (*visit)(const char *path, void *context);
    void *context;
};

/* Of a line of mountinfo(5). */
struct mount {
    const char *root; /* the group that is seen at .. */
    const char *point;
    const char *type;
    const char *options; /* of version 1 its controllers are among them */
};

/* False: the end. What is too long for the line is as if it were not there. */
static bool read_line(FILE *file, char line[LINE_BYTES_MAX]) {
    while (fgets(line, LINE_BYTES_MAX, file)) {
        size_t bytes = strcspn(line, "\n");
        if (line[bytes] == '\n' || feof(file)) {
            line[bytes] = '\0';
            return true;
        }
        for (int c = 0; c != '\n' && c != EOF;)
            c = fgetc(file);
    }
    return false;
}

/* Is it one of a list with commas? */
static bool is_among(const char *item, const char *list) {
    size_t length = strlen(item);
    for (const char *at = list; *at; at += strcspn(at, ","), at += *at == ',')
        if (strncmp(at, item, length) == 0 && strcspn(at, ",") == length)
            return true;
    return false;
}

static bool is_octal(char c) { return c >= '0' && c <= '7'; }

/* The kernel writes a space as \040. */
static void unescape(char *text) {
    char *to = text;
    for (const char *at = text; *at; to++)
        if (at[0] == '\\' && is_octal(at[1]) && is_octal(at[2]) && is_octal(at[3])) {
            *to = (char)((at[1] - '0') << 6 | (at[2] - '0') << 3 | (at[3] - '0'));
            at += 4;
        } else
            *to = *at++;
    *to = '\0';
}

/* number parent device ROOT POINT options [more]... - TYPE source OPTIONS */
static bool read_mount(char *line, struct mount *ret_mount) {
    char *behind = strstr(line, " - "), *rest = NULL, *field[5];
    if (!behind)
        return false;
    *behind = '\0';
    for (int i = 0; i < 5; i++)
        if (!(field[i] = strtok_r(i ? NULL : line, " ", &rest)))
            return false;
    unescape(field[3]);
    unescape(field[4]);
    char *type = strtok_r(behind + 3, " ", &rest), *source = strtok_r(NULL, " ", &rest),
         *options = strtok_r(NULL, " ", &rest);
    *ret_mount = (struct mount){field[3], field[4], type, options ? options : ""};
    return type && source;
}

/* What is left of a group below the one that a mount shows; NULL: it is not in there. */
static const char *below(const char *group, const char *root) {
    size_t bytes = strcmp(root, "/") == 0 ? 0 : strlen(root);
    bool within = strncmp(group, root, bytes) == 0 && (!group[bytes] || group[bytes] == '/');
    return within ? group + bytes : NULL;
}

/* A group and all around it that the mount shows. */
static void visit_group(const struct walk *walk, const struct mount *mount, const char *group,
                        const char *file) {
    char within[LINE_BYTES_MAX], path[2 * LINE_BYTES_MAX];
    snprintf(within, sizeof within, "%s", strcmp(group, "/") == 0 ? "" : group);
    for (;;) {
        int bytes = snprintf(path, sizeof path, "%s%s/%s", mount->point, within, file);
        if (bytes < (int)sizeof path)
            walk->visit(path, walk->context);
        char *end = strrchr(within, '/');
        if (!end)
            return;
        *end = '\0';
    }
}

/* Where the group, or all that a mount shows if none shows it, may have its limit. -> were any?
 * version: less 1, as everywhere below. */
static bool visit_mounts(const struct walk *walk, int version, const char *group, bool others) {
    static const char *const types[] = {"cgroup", "cgroup2"};
    char line[LINE_BYTES_MAX];
    bool any = false;
    struct mount mount;
    FILE *file = fopen(walk->mounts, "re");
    while (file && read_line(file, line)) {
        if (!read_mount(line, &mount) || strcmp(mount.type, types[version]) != 0 ||
            (version == 0 && !is_among(walk->limit->controller, mount.options)))
            continue;
        const char *rest = others ? "" : below(group, mount.root);
        if (rest)
            visit_group(walk, &mount, rest, walk->limit->file[version]);
        any = any || rest;
    }
    if (file)
        fclose(file);
    return any;
}

void kld_cgroup_walk(const char *groups, const char *mounts, const struct kld_cgroup_limit *limit,
                     void (*visit)(const char *path, void *context), void *context) {
    const struct walk walk = {mounts, limit, visit, context};
    char line[LINE_BYTES_MAX];
    FILE *file = fopen(groups, "re");
    while (file && read_line(file, line)) { /* number:controllers:group */
        char *controllers = strchr(line, ':'),
             *group = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!group)
            continue;
        *group++ = '\0';
        int version = *++controllers ? 0 : 1;
        if (!limit->file[version] || (version == 0 && !is_among(limit->controller, controllers)))
            continue;
        /* A container may see its own group as the root, and read what the host calls it. */
        if (!visit_mounts(&walk, version, group, false))
            visit_mounts(&walk, version, group, true);
    }
    if (file)
        fclose(file);
}

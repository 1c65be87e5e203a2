/* test_cpus.c - quotas of control groups, in a tree of files like the kernel's. */
#include "proto/cpus.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "tests/unit/unit.h"

struct step {
    const char *file, *text, *group;
    uint32_t cpus; /* then */
};

static void write_file(const char *path, const char *text) {
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    ck_assert_int_ge(fputs(text, file), 0);
    ck_assert_int_eq(fclose(file), 0);
}

/* Both versions, as systemd mounts them; # is the root of the tree. */
static const char usual[] = "25 30 0:22 / #/unused rw,nosuid shared:2 - tmpfs tmpfs rw\n"
                            "31 25 0:26 / # rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
                            "32 25 0:27 / #/cpu rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n";

static void write_mounts(const char *path, const char *mounts, const char *root) {
    char text[8192] = "";
    size_t bytes = 0;
    for (; *mounts; mounts++)
        bytes += (size_t)snprintf(text + bytes, sizeof text - bytes, *mounts == '#' ? "%s" : "%.1s",
                                  *mounts == '#' ? root : mounts);
    ck_assert_uint_lt(bytes, sizeof text);
    write_file(path, text);
}

/* One behind the other, with what those before have written; a NULL file: nothing new. */
static void go_with(const char *mounts, const struct step *steps, size_t count) {
    char root[] = "/tmp/kld-test-XXXXXX", groups[64], mounted[64], path[96], command[160];
    ck_assert_ptr_nonnull(mkdtemp(root));
    snprintf(command, sizeof command, "cd %s && mkdir -p a/b cpu/a/b cpu,cpuacct/a 'a place'",
             root);
    ck_assert_int_eq(system(command), 0);
    snprintf(groups, sizeof groups, "%s/groups", root);
    snprintf(mounted, sizeof mounted, "%s/mountinfo", root);
    write_mounts(mounted, mounts, root);
    for (size_t i = 0; i < count; i++) {
        snprintf(path, sizeof path, "%s/%s", root, steps[i].file ? steps[i].file : "unused");
        write_file(path, steps[i].text);
        write_file(groups, steps[i].group);
        uint32_t cpus = kld_cpus_quota(groups, mounted);
        ck_assert_msg(cpus == steps[i].cpus, "step %zu: %u, not %u", i, cpus, steps[i].cpus);
    }
    snprintf(command, sizeof command, "rm -r %s", root);
    ck_assert_int_eq(system(command), 0);
}

static void go(const struct step *steps, size_t count) { go_with(usual, steps, count); }

START_TEST(a_quota_is_rounded_up) {
    static const struct step steps[] = {
        {"cpu.max", "max 100000\n", "0::/\n", UINT32_MAX},
        {"cpu.max", "200000 100000\n", "0::/\n", 2},
        {"cpu.max", "250000 100000\n", "0::/\n", 3},
        {"cpu.max", "1000 100000\n", "0::/\n", 1},
        {"cpu.max", "9223372036854775807 1\n", "0::/\n", UINT32_MAX},
        {"cpu.max", "18446744073709551615 1\n", "0::/\n", UINT32_MAX},
        {"cpu.max", "5 0\n", "0::/\n", UINT32_MAX},
        {"cpu.max", "0 5\n", "0::/\n", UINT32_MAX},
        {"cpu.max", "5\n", "0::/\n", UINT32_MAX},
        {"cpu.max", "", "0::/\n", UINT32_MAX},
        {NULL, "", "nothing\n:\n", UINT32_MAX},
    };
    go(steps, sizeof steps / sizeof steps[0]);
}
END_TEST

/* A service has its quota in a group of its own, below the root: the least on the way counts. */
START_TEST(the_least_of_a_group_and_those_around_it) {
    static const struct step steps[] = {
        {"a/b/cpu.max", "max 100000\n", "0::/a/b\n", UINT32_MAX},
        {"a/cpu.max", "300000 100000\n", "0::/a/b\n", 3},
        {"a/b/cpu.max", "700000 100000\n", "0::/a/b\n", 3},
        {"a/b/cpu.max", "150000 100000\n", "0::/a/b\n", 2},
        {"a/b/cpu.max", "150000 100000\n", "0::/a\n", 3},
        {"cpu.max", "100000 100000\n", "3:cpu,cpuacct:/a\n0::/of/the/host\n", 1},
    };
    go(steps, sizeof steps / sizeof steps[0]);
}
END_TEST

START_TEST(groups_of_the_first_version) {
    static const struct step steps[] = {
        {"cpu/cpu.cfs_period_us", "100000\n", "4:cpu,cpuacct:/a/b\n0::/\n", UINT32_MAX},
        {"cpu/cpu.cfs_quota_us", "-1\n", "4:cpu,cpuacct:/a/b\n0::/\n", UINT32_MAX},
        {"cpu/a/cpu.cfs_quota_us", "350000\n", "4:cpu,cpuacct:/a/b\n0::/\n", UINT32_MAX},
        {"cpu/a/cpu.cfs_period_us", "100000\n", "4:cpu,cpuacct:/a/b\n0::/\n", 4},
        {"cpu/a/b/cpu.cfs_period_us", "50000\n", "4:cpuacct,cpu:/a/b\n0::/\n", 4},
        {"cpu/a/b/cpu.cfs_quota_us", "50000\n", "4:cpuacct,cpu:/a/b\n0::/\n", 1},
        {NULL, "", "4:cpu:/a\n", 4},
        {NULL, "", "4:cpuacct,cpuset:/a/b\n", UINT32_MAX},
        {"cpu/cpu.cfs_quota_us", "200000\n", "4:cpu:/of/the/host\n", 2}, /* as a container's own */
        {"a/cpu.max", "100000 100000\n", "4:cpu:/a\n0::/a\n", 1},        /* of both */
    };
    go(steps, sizeof steps / sizeof steps[0]);
}
END_TEST

/* Not every host has a link that is called as the controller alone. */
START_TEST(a_hierarchy_is_where_it_is_mounted) {
    static const struct step steps[] = {
        {"cpu,cpuacct/cpu.cfs_period_us", "100000\n", "4:cpu,cpuacct:/a\n", UINT32_MAX},
        {"cpu,cpuacct/cpu.cfs_quota_us", "300000\n", "4:cpu,cpuacct:/a\n", 3},
        {"cpu,cpuacct/a/cpu.cfs_period_us", "100000\n", "4:cpu,cpuacct:/a\n", 3},
        {"cpu,cpuacct/a/cpu.cfs_quota_us", "100000\n", "4:cpu,cpuacct:/a\n", 1},
        {NULL, "", "4:cpu,cpuacct:/\n", 3},
        {"cpu.max", "100000 100000\n", "4:cpu,cpuacct:/\n0::/\n", 3}, /* nothing is there */
        {"a place/cpu.max", "200000 100000\n", "4:cpu,cpuacct:/\n0::/\n", 2},
    };
    go_with(
        "32 25 0:27 / #/cpu rw - tmpfs tmpfs rw\n"
        "33 25 0:28 / #/cpu,cpuacct rw,nosuid shared:3 master:1 - cgroup cgroup rw,cpuacct,cpu\n"
        "34 25 0:29 / #/cpu rw - cgroup cgroup rw,cpuset\n"
        "35 25 0:30 / #/a\\040place rw - cgroup2 none rw\n",
        steps, sizeof steps / sizeof steps[0]);
}
END_TEST

/* A container's, whose mount shows its own group at the top and others' elsewhere. */
START_TEST(a_mount_may_show_a_part_of_the_hierarchy) {
    static const struct step steps[] = {
        {"cpu/cpu.cfs_period_us", "100000\n", "4:cpu:/docker/x/a\n", UINT32_MAX},
        {"cpu/cpu.cfs_quota_us", "400000\n", "4:cpu:/docker/x/a\n", 4},
        {"cpu/a/cpu.cfs_period_us", "100000\n", "4:cpu:/docker/x/a\n", 4},
        {"cpu/a/cpu.cfs_quota_us", "200000\n", "4:cpu:/docker/x/a\n", 2},
        {NULL, "", "4:cpu:/docker/x\n", 4},
        {"cpu,cpuacct/cpu.cfs_period_us", "100000\n", "4:cpu:/docker/x\n", 4},
        {"cpu,cpuacct/cpu.cfs_quota_us", "100000\n", "4:cpu:/docker/x\n", 4},
        {NULL, "", "4:cpu:/docker/xy\n", 1}, /* neither's: then the least of both */
        {NULL, "", "4:cpu:/docker/y/z\n", 1},
    };
    go_with("33 25 0:28 /docker/x #/cpu rw - cgroup cgroup rw,cpu\n"
            "34 25 0:28 /docker/y #/cpu,cpuacct rw - cgroup cgroup rw,cpu\n",
            steps, sizeof steps / sizeof steps[0]);
}
END_TEST

START_TEST(what_is_no_line_of_mounts_is_passed_over) {
    char mounts[6000];
    static const struct step steps[] = {
        {"cpu.max", "200000 100000\n", "0::/\n", 2},
        {"a/cpu.max", "100000 100000\n", "0::/a\n", 1},
    };
    snprintf(mounts, sizeof mounts,
             "\n - \n31 25 - cgroup2\n31 25 0:26 / #/a rw - \n31 25 0:26 / #/a rw - cgroup2\n"
             "%05000d - cgroup2 none rw\n31 25 0:26 / # rw - cgroup2 none",
             0);
    go_with(mounts, steps, sizeof steps / sizeof steps[0]);
}
END_TEST

START_TEST(no_more_than_the_processors_of_this_thread) {
    cpu_set_t before, one;
    ck_assert_int_eq(sched_getaffinity(0, sizeof before, &before), 0);
    uint32_t all = kld_cpus_usable();
    ck_assert_uint_ge(all, 1);
    ck_assert_uint_le(all, (uint32_t)CPU_COUNT(&before));
    CPU_ZERO(&one);
    for (int cpu = 0; CPU_COUNT(&one) == 0; cpu++)
        if (CPU_ISSET(cpu, &before))
            CPU_SET(cpu, &one);
    ck_assert_int_eq(sched_setaffinity(0, sizeof one, &one), 0);
    ck_assert_uint_eq(kld_cpus_usable(), 1);
}
END_TEST

UNIT_MAIN("proto/cpus", a_quota_is_rounded_up, the_least_of_a_group_and_those_around_it,
          groups_of_the_first_version, a_hierarchy_is_where_it_is_mounted,
          a_mount_may_show_a_part_of_the_hierarchy, what_is_no_line_of_mounts_is_passed_over,
          no_more_than_the_processors_of_this_thread)

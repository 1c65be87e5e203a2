/* test_host_memory.c - the limits of control groups, in a tree of files like the kernel's. */
#include "server/host_memory.h"

#include <stdio.h>
#include <sys/stat.h>

#include "tests/unit/unit.h"

static char root[] = "/tmp/kld-test-XXXXXX";

static void begin(void) { ck_assert_ptr_nonnull(mkdtemp(root)); }

static void put(const char *name, const char *text) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", root, name);
    FILE *file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    ck_assert_int_ge(fputs(text, file), 0);
    ck_assert_int_eq(fclose(file), 0);
}

static void make(const char *name) {
    char path[256];
    snprintf(path, sizeof path, "%s/%s", root, name);
    ck_assert_int_eq(mkdir(path, 0700), 0);
}

static uint64_t of(const char *groups) {
    char path[256], mounts[256], text[512];
    snprintf(text, sizeof text,
             "31 25 0:26 / %s rw - cgroup2 cgroup2 rw\n"
             "32 25 0:27 / %s/memory rw - cgroup cgroup rw,hugetlb,memory\n",
             root, root);
    put("mounts", text);
    put("groups", groups);
    snprintf(path, sizeof path, "%s/groups", root);
    snprintf(mounts, sizeof mounts, "%s/mounts", root);
    return kld_cgroup_memory_bytes(path, mounts);
}

static void end(void) {
    char command[256];
    snprintf(command, sizeof command, "rm -r %s", root);
    ck_assert_int_eq(system(command), 0);
}

START_TEST(the_least_of_a_group_and_those_around_it) {
    begin();
    make("a");
    make("a/b");
    ck_assert_uint_eq(of("0::/a/b\n"), UINT64_MAX);
    put("a/b/memory.max", "max\n");
    ck_assert_uint_eq(of("0::/a/b\n"), UINT64_MAX);
    put("a/memory.max", "4096000\n");
    ck_assert_uint_eq(of("0::/a/b\n"), 4096000);
    put("a/b/memory.max", "8192000\n");
    ck_assert_uint_eq(of("0::/a/b\n"), 4096000);
    put("a/b/memory.max", "1024000\n");
    ck_assert_uint_eq(of("0::/a/b\n"), 1024000);
    ck_assert_uint_eq(of("0::/\n"), UINT64_MAX);
    put("memory.max", "512000\n"); /* as a container sees its own */
    ck_assert_uint_eq(of("0::/\n"), 512000);
    ck_assert_uint_eq(of("0::/of/the/host\n"), 512000);
    end();
}
END_TEST

START_TEST(groups_of_the_first_version) {
    begin();
    make("memory");
    make("memory/a");
    put("memory/a/memory.limit_in_bytes", "2048000\n");
    put("memory/memory.limit_in_bytes", "9223372036854771712\n");
    ck_assert_uint_eq(of("5:cpu:/a\n4:hugetlb,memory:/a\n0::/\n"), 2048000);
    ck_assert_uint_eq(of("4:memory:/\n"), UINT64_C(9223372036854771712));
    ck_assert_uint_eq(of("4:memoryless:/a\n:\nnothing\n"), UINT64_MAX);
    end();
}
END_TEST

START_TEST(there_is_some) { ck_assert_uint_gt(kld_host_memory_bytes(), 1 << 20); }
END_TEST

UNIT_MAIN("server/host_memory", the_least_of_a_group_and_those_around_it,
          groups_of_the_first_version, there_is_some)

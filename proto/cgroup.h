/* cgroup.h - the control groups that a process is in, of either version, and all around them: the
 * files in which they may say what they allow. What is in these is for the caller. Any thread. */
#ifndef KLD_PROTO_CGROUP_H
#define KLD_PROTO_CGROUP_H

#define KLD_CGROUP_GROUPS "/proc/self/cgroup"
#define KLD_CGROUP_MOUNTS "/proc/self/mountinfo"

/* A controller, and how the file with its limit is called; NULL: not looked at. */
struct kld_cgroup_limit {
    const char *controller;
    const char *file[2]; /* of version 1 and 2 */
};

/* visit(path, context) for each file that could be: it may not be there. groups: a file like
 * /proc/self/cgroup; mounts: one like /proc/self/mountinfo, which tells where the groups are. */
void kld_cgroup_walk(const char *groups, const char *mounts, const struct kld_cgroup_limit *limit,
                     void (*visit)(const char *path, void *context), void *context);

#endif

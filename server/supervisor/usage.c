/* usage.c - at start and once a second, what the kernel says of the server's processes goes into
 * the page, for process_* of /metrics: the gateway, which is asked for it, may not read /proc.
 * Reads nothing but /proc, logs nothing: what cannot be read is left out. Supervisor process, its
 * thread. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "server/supervisor/supervisor.h"

#define LOOK_MS 1000

static uint64_t clock_ms(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* Fields are counted as proc(5) does; the name of the program, the second, may hold anything. */
static bool read_stat(pid_t pid, struct kld_stats_process *process, struct kld_seen *seen) {
    char path[48], text[1024];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    size_t bytes = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[bytes] = '\0';
    const char *at = strrchr(text, ')');
    unsigned long long user, system, started, virtual_bytes;
    long long pages;
    if (!at || sscanf(at + 1,
                      " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu %*d %*d %*d %*d %*d"
                      " %*d %llu %llu %lld",
                      &user, &system, &started, &virtual_bytes, &pages) != 5)
        return false;
    uint64_t ticks = (uint64_t)sysconf(_SC_CLK_TCK);
    atomic_store(&process->cpu_ms, (user + system) * 1000 / ticks);
    atomic_store(&process->virtual_bytes, virtual_bytes);
    atomic_store(&process->resident_bytes, (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE));
    /* Once: a clock that is set later on is no restart, which is what a change of it says. */
    if (seen->pid != pid || seen->ticks != started)
        atomic_store(&process->started_ms,
                     clock_ms(CLOCK_REALTIME) - clock_ms(CLOCK_BOOTTIME) + started * 1000 / ticks);
    *seen = (struct kld_seen){.pid = pid, .ticks = started};
    return true;
}

static uint64_t count_fds(pid_t pid) {
    char path[48];
    struct stat info;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    if (stat(path, &info) == 0 && info.st_size > 0) /* from Linux 6.2 on */
        return (uint64_t)info.st_size;
    DIR *folder = opendir(path);
    if (!folder)
        return 0;
    uint64_t count = 0;
    for (const struct dirent *entry; (entry = readdir(folder));)
        count += entry->d_name[0] != '.';
    closedir(folder);
    return count - (pid == getpid()); /* that of the folder itself */
}

/* pid 0: it does not run. */
static void look_at(struct kld_supervisor *supervisor, uint32_t place, pid_t pid) {
    struct kld_stats_process *process = &supervisor->page->process[place];
    struct rlimit limit;
    if (!pid || !read_stat(pid, process, &supervisor->seen[place])) {
        atomic_store(&process->started_ms, 0);
        supervisor->seen[place].pid = 0;
        return;
    }
    atomic_store(&process->open_fds, count_fds(pid));
    if (prlimit(pid, RLIMIT_NOFILE, NULL, &limit) == 0)
        atomic_store(&process->max_fds, limit.rlim_cur);
}

static pid_t pid_of(const struct kld_watched *child) {
    return child->life ? child->life->process.pid : 0;
}

static void look(uv_timer_t *timer) {
    struct kld_supervisor *supervisor = timer->data;
    look_at(supervisor, KLD_PROCESS_SUPERVISOR, getpid());
    look_at(supervisor, KLD_PROCESS_GATEWAY, pid_of(&supervisor->gateway));
    for (uint32_t i = 0; i < supervisor->workers; i++)
        look_at(supervisor, KLD_PROCESS_WORKER + i, pid_of(&supervisor->worker[i]));
}

void kld_usage_start(struct kld_supervisor *supervisor) {
    uv_timer_init(&supervisor->loop, &supervisor->usage);
    supervisor->usage.data = supervisor;
    uv_timer_start(&supervisor->usage, look, 0, LOOK_MS); /* one that soon fails was there, too */
}

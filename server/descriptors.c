/* descriptors.c - see descriptors.h. */
#include "server/descriptors.h"

#include <sys/resource.h>

#include "server/log.h"

static uint64_t wanted_max = KLD_DESCRIPTORS_OWN; /* written before there are other threads */

uint64_t kld_descriptors_max(void) {
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
        limit.rlim_cur > wanted_max)
        return wanted_max;
    return limit.rlim_cur;
}

void kld_descriptors_raise(uint64_t wanted) {
    struct rlimit limit;
    wanted_max = wanted;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return;
    if (limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
        getrlimit(RLIMIT_NOFILE, &limit);
    }
    if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur >= wanted)
        return;
    kld_log(
        KLD_LOG_WARN, "few descriptors",
        "limit=%llu wanted=%llu text=\"the system lets this process open fewer descriptors than "
        "the configured limits let clients fill; once they do, clients wait or are refused. "
        "Raise the limit (ulimit -Hn, LimitNOFILE=) or lower those\"",
        (unsigned long long)limit.rlim_cur, (unsigned long long)wanted);
}

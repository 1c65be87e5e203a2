/* config.c - libFuzzer over what the processes of a server read at their start and from each other:
 * flags, environment and the JSON file; the memfd of secrets; orders and reports over the control
 * socket; what a service manager says in the environment. (What the texts of the secrets mean:
 * gateway.c.)
 *
 * Input: 1 byte that chooses, and for the configuration: lines, each a flag; behind an empty one
 * each a variable; behind an empty one the file. Reports: see hear_reports(). Else the bytes. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "server/config.h"
#include "server/log.h"
#include "server/role.h"
#include "server/secrets.h"
#include "server/supervisor/notify.h"
#include "server/supervisor/supervisor.h"
#include "tests/fuzz/common/fuzz.h"

#define LINES_MAX 16
#define REPORTS 0xff /* the byte that chooses them; found inputs know the others */
#define REPORTS_MAX 8
#define NOBODY 0x3fffffff /* a process number that there is not */

static int file_fd, pair[2];

/* A server of one worker, without processes: what it hears of them is written here. */
static struct kld_supervisor supervisor;
static struct kld_life lives[2]; /* of the gateway, of the worker */
static int said[2];              /* the children's ends */

static void open_life(struct kld_life *life, struct kld_watched *child, const char *role,
                      int *ret_end) {
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    kld_watched_init(child, &supervisor, role, 0, -1);
    *life = (struct kld_life){.child = child, .control_fd = ends[0], .control_made = true};
    life->process.pid = NOBODY;
    require(uv_poll_init(&supervisor.loop, &life->control, ends[0]) == 0);
    child->lives = life;
    *ret_end = ends[1];
}

static void open_supervisor(void) {
    struct kld_error err;
    enum kld_config_action action;
    char *no_environment[] = {NULL};
    require(kld_config_parse(0, NULL, no_environment, &supervisor.config, &action, &err) == KLD_OK);
    require(kld_stats_create(&supervisor.page, &supervisor.stats_fds, &err) == KLD_OK);
    require(uv_loop_init(&supervisor.loop) == 0);
    supervisor.notify.fd = supervisor.hangup.fd = -1;
    supervisor.reload.secrets_fd = supervisor.reload.next_fd = -1;
    supervisor.workers = supervisor.workers_max = 1;
    supervisor.announced = true;
    supervisor.reload.in_use = supervisor.reload.next = supervisor.config;
    kld_reload_init(&supervisor);
    open_life(&lives[0], &supervisor.gateway, "gateway", &said[0]);
    open_life(&lives[1], &supervisor.worker[0], "worker", &said[1]);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    struct kld_error err;
    file_fd = memfd_create("fuzz", MFD_CLOEXEC);
    require(file_fd >= 0);
    require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0);
    fuzz_log_to_nowhere("error");
    open_supervisor();
    return 0;
}

static void fill_file(const void *bytes, size_t count) {
    require(ftruncate(file_fd, 0) == 0);
    require(pwrite(file_fd, bytes, count, 0) == (ssize_t)count);
}

/* Up to an empty line. */
static int take_lines(struct fuzz_input *input, char *lines[LINES_MAX + 1]) {
    int count = 0;
    while (count < LINES_MAX && input->at < input->end) {
        lines[count] = fuzz_text(input);
        if (!lines[count][0])
            break;
        count++;
    }
    if (count < LINES_MAX && lines[count])
        free(lines[count]);
    lines[count] = NULL;
    return count;
}

static bool same(const struct kld_config *a, const struct kld_config *b) {
#define X(TYPE, name, value, help)                                                                 \
    if (memcmp(&a->name, &b->name, sizeof a->name) != 0)                                           \
        return false;
    KLD_CONFIG_MAP(X)
#undef X
    return true;
}

/* A child that is given the configuration as flags has the same one. */
static void require_handed_on(const struct kld_config *config) {
    char *no_environment[] = {NULL}, **flags = kld_config_arguments(config);
    struct kld_config again;
    enum kld_config_action action;
    struct kld_error err;
    int count = 0;
    require(flags != NULL);
    while (flags[count])
        count++;
    require(kld_config_parse(count, flags, no_environment, &again, &action, &err) == KLD_OK);
    require(action == KLD_CONFIG_RUN && same(config, &again));
    kld_config_arguments_free(flags);
}

static void require_fit(const struct kld_config *config) {
    uint32_t devices = kld_config_devices(config);
    require(devices <= KLD_DEVICES_MAX);
    for (uint32_t i = 0; i < devices; i++)
        require(kld_config_device(config, i) <= KLD_DEVICE_NUMBER_MAX);
    require(config->http_threads <= 64 && config->unix_mode <= 0777 && config->clients_max >= 1);
}

static void adopt(const struct kld_config *next) {
    struct kld_config config, before;
    enum kld_config_action action;
    struct kld_error err;
    char *no_environment[] = {NULL}, kept[64];
    require(kld_config_parse(0, NULL, no_environment, &config, &action, &err) == KLD_OK);
    before = config;
    kld_config_adopt(&config, next, kept, sizeof kept);
    require(memchr(kept, 0, sizeof kept) != NULL);
    require(strcmp(config.unix, before.unix) == 0 && config.clients_max == before.clients_max);
    require_handed_on(&config);
}

static void configure(struct fuzz_input *input) {
    char *flags[LINES_MAX + 1] = {NULL}, *variables[LINES_MAX + 1] = {NULL}, path[40];
    char *file_flag[LINES_MAX + 2];
    struct kld_config config;
    enum kld_config_action action = KLD_CONFIG_RUN;
    struct kld_error err = {.status = KLD_OK};
    int count = take_lines(input, flags);
    take_lines(input, variables);
    fill_file(input->at, (size_t)(input->end - input->at));
    snprintf(path, sizeof path, "--config=/proc/self/fd/%d", file_fd);
    memcpy(file_flag, flags, sizeof flags);
    for (int i = 0; i < count; i++) /* no other file is opened */
        if (strncmp(flags[i], "--config", 8) == 0)
            flags[i][2] = 'k';
    for (int i = 0; variables[i]; i++)
        if (strncmp(variables[i], "KLD_CONFIG=", 11) == 0)
            variables[i][4] = 'k';
    if (input->at < input->end && count < LINES_MAX) {
        file_flag[count++] = path;
        file_flag[count] = NULL;
    }
    enum kld_status status = kld_config_parse(count, file_flag, variables, &config, &action, &err);
    if (status) {
        require_error(status, &err);
    } else if (action == KLD_CONFIG_RUN) {
        require_fit(&config);
        require_handed_on(&config);
        adopt(&config);
    }
    for (int i = 0; i < LINES_MAX; i++) {
        free(flags[i]);
        free(variables[i]);
        if (!variables[i] && !flags[i])
            break;
    }
}

static void unpack_secrets(struct fuzz_input *input) {
    struct kld_secrets secrets;
    struct kld_error err;
    fill_file(input->at, (size_t)(input->end - input->at));
    enum kld_status status = kld_secrets_unpack(file_fd, &secrets, &err);
    if (status) {
        require_error(status, &err);
        return;
    }
#define X(setting) require(!secrets.setting || strlen(secrets.setting) <= KLD_SECRET_BYTES_MAX);
    KLD_SECRET_MAP(X)
#undef X
    kld_secrets_forget(&secrets);
}

static void read_secrets(struct fuzz_input *input) {
    static struct kld_config config;
    struct kld_secrets secrets;
    struct kld_error err;
    int fd;
    fill_file(input->at, (size_t)(input->end - input->at));
    snprintf(config.tokens, sizeof config.tokens, "/proc/self/fd/%d", file_fd);
    enum kld_status status = kld_secrets_read(&config, &secrets, &err);
    if (status) {
        require_error(status, &err);
        return;
    }
    struct kld_secrets again;
    require(kld_secrets_pack(&secrets, &fd, &err) == KLD_OK);
    require(kld_secrets_unpack(fd, &again, &err) == KLD_OK);
    require(strcmp(secrets.tokens, again.tokens) == 0 && !again.tls_key);
    close(fd);
    kld_secrets_forget(&secrets);
    kld_secrets_forget(&again);
}

static void hear(struct fuzz_input *input) {
    struct kld_child_order order;
    uint8_t bytes[256];
    int fds[4] = {file_fd, file_fd, file_fd, file_fd}, got = -1;
    unsigned open = fuzz_open_fds(), how = fuzz_byte(input);
    size_t count = fuzz_bytes(input, bytes, sizeof bytes);
    union {
        char space[CMSG_SPACE(sizeof fds)];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec part = {.iov_base = bytes, .iov_len = count};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (how % 5) {
        message.msg_control = control.space;
        message.msg_controllen = CMSG_SPACE(how % 5 * sizeof(int));
        CMSG_FIRSTHDR(&message)->cmsg_level = SOL_SOCKET;
        CMSG_FIRSTHDR(&message)->cmsg_type = SCM_RIGHTS;
        CMSG_FIRSTHDR(&message)->cmsg_len = CMSG_LEN(how % 5 * sizeof(int));
        memcpy(CMSG_DATA(CMSG_FIRSTHDR(&message)), fds, how % 5 * sizeof(int));
    }
    require(sendmsg(pair[0], &message, MSG_NOSIGNAL) == (ssize_t)count);
    bool wanted = how & 0x80;
    enum kld_heard heard = kld_child_hear(pair[1], &order, wanted ? &got : NULL);
    require(heard == (count ? KLD_HEARD_ORDER : KLD_HEARD_END));
    require(memchr(order.log_level, 0, sizeof order.log_level) != NULL);
    if (count)
        kld_log_set_level(order.log_level);
    kld_log_set_level("error");
    if (got >= 0)
        close(got);
    (void)open;
    require(!count || fuzz_open_fds() == open);
    if (heard == KLD_HEARD_END) /* an empty packet ends it; there is no other */
        while (recv(pair[1], bytes, sizeof bytes, MSG_DONTWAIT) > 0)
            ;
}

static void begin_life(struct kld_life *life, unsigned how) {
    struct kld_watched *child = life->child;
    uv_timer_stop(&child->pause);
    life->control_open = true;
    life->unheard = 0;
    child->life = life;
    child->ever_ready = true; /* else the server ends, which is right */
    child->state = how & 1 ? KLD_CHILD_READY : KLD_CHILD_STARTING;
    child->ready_ms = how & 1;
    child->refusals = 0;
}

/* One of the right size with fields of the input, or any bytes. */
static size_t make_report(struct fuzz_input *input, uint8_t *packet, size_t room) {
    struct kld_child_report report;
    unsigned how = fuzz_byte(input);
    size_t count = fuzz_byte(input);
    if (how & 1)
        return fuzz_bytes(input, packet, how & 2 ? count : room);
    memset(&report, how & 2 ? 'x' : 0, sizeof report); /* also texts that do not end */
    report.about = (how >> 2) % 3;
    report.status = fuzz_byte(input);
    report.devices = fuzz_short(input);
    fuzz_bytes(input, report.backend, count % (sizeof report.backend + 1));
    fuzz_bytes(input, report.text, count);
    memcpy(packet, &report, sizeof report);
    return sizeof report;
}

/* 1 byte: what each is at, and whether a reload waits for its answer; then packets, of each 1 byte:
 * who sends it. A child can be taken for lost, and a worker have a successor; nothing else that it
 * says ends, starts or changes anything. */
static void hear_reports(struct fuzz_input *input) {
    uint8_t packet[2 * sizeof(struct kld_child_report)];
    unsigned open = fuzz_open_fds(), how = fuzz_byte(input);
    struct kld_config before = supervisor.config;
    begin_life(&lives[0], how);
    begin_life(&lives[1], how >> 1);
    supervisor.reload.state = how & 4 ? KLD_RELOAD_ASKING : KLD_RELOAD_IDLE;
    supervisor.watchdog_due = how & 8;
    for (int i = 0; i < REPORTS_MAX && input->at < input->end; i++) {
        struct kld_life *life = &lives[fuzz_byte(input) & 1];
        size_t count = make_report(input, packet, sizeof packet);
        int end = said[life - lives];
        require(send(end, packet, count, MSG_NOSIGNAL) == (ssize_t)count);
        bool heard = life->control_open;
        kld_watched_hear(life);
        require(life->control_open == (heard && !life->unheard));
        while (recv(life->control_fd, packet, sizeof packet, MSG_DONTWAIT) >= 0)
            ;                                /* who is not heard any more */
        for (int side = 0; side < 2; side++) /* what they were told */
            while (recv(said[side], packet, sizeof packet, MSG_DONTWAIT) > 0)
                ;
    }
    require(!supervisor.failed && !supervisor.draining && !supervisor.killing);
    require(supervisor.workers == 1 && atomic_load(&supervisor.page->workers) == 0);
    require(supervisor.gateway.life == &lives[0] && supervisor.gateway.lives == &lives[0]);
    require(supervisor.worker[0].lives == &lives[1] && !lives[1].next);
    require(memchr(supervisor.config.backend, 0, sizeof supervisor.config.backend) != NULL);
    memcpy(supervisor.config.backend, before.backend, sizeof before.backend);
    require(same(&supervisor.config, &before));
    require(fuzz_open_fds() == open);
}

static void notify(struct fuzz_input *input) {
    static const char *const names[] = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"};
    struct kld_notify notify;
    unsigned open = fuzz_open_fds();
    for (int i = 0; i < 3; i++) {
        char *value = fuzz_text(input);
        if (strchr(value, '/') && i == 0)
            value[0] = '@'; /* nobody but us is told anything */
        setenv(names[i], value, 1);
        free(value);
    }
    kld_notify_open(&notify);
    require(notify.fd < 0 || notify.address_bytes <= sizeof notify.address);
    kld_notify_close(&notify);
    require(fuzz_open_fds() == open);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    struct fuzz_input input = {data, data + bytes};
    uint8_t what = fuzz_byte(&input);
    if (what == REPORTS) {
        hear_reports(&input);
        return 0;
    }
    switch (what % 6) {
    case 0: unpack_secrets(&input); break;
    case 1: hear(&input); break;
    case 2: read_secrets(&input); break;
    case 3: notify(&input); break;
    default: configure(&input);
    }
    return 0;
}

/* log.c - formats one line an event and writes it with one write(2) to standard error.
 *
 * It never waits: a pipe is opened again without blocking (so that the mode of the inherited one,
 * which others share, stays as it is), one that another user made is written to where it has room,
 * a socket is sent to without waiting, and what does not fit is dropped and counted. The settings
 * below are written once, by kld_log_init(), before a role starts threads, but for the level; after
 * that any thread logs. */
#include "server/log.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "server/stats.h"

#define LINE_MAX_BYTES 2048 /* below PIPE_BUF: one write is never split */
#define DETAILS_MAX_BYTES 1024
#define FORMAT_MAX_BYTES 512 /* of a longer one, which there is not, quotes in values end them */

static const char *const level_names[] = {"debug", "info", "warn", "error"};
#define LEVELS (sizeof level_names / sizeof level_names[0])

static struct {
    _Atomic uint32_t level;    /* enum kld_log_level */
    bool json, socket, blocks; /* blocks: it was not ours to open again */
    int fd;
    char role[16];
    struct kld_stats *stats;
} settings = {.level = KLD_LOG_INFO, .fd = STDERR_FILENO, .role = "kld-server"};

struct line {
    char text[LINE_MAX_BYTES];
    size_t bytes;
};

/* Appends as much as leaves room for the end of the line. */
static void put(struct line *line, const char *text, size_t bytes) {
    size_t room = sizeof line->text - 8 - line->bytes;
    if (bytes > room)
        bytes = room;
    memcpy(line->text + line->bytes, text, bytes);
    line->bytes += bytes;
}

static void put_text(struct line *line, const char *text) { put(line, text, strlen(text)); }

static void put_json_char(struct line *line, unsigned char c) {
    char escaped[8];
    if (c == '"' || c == '\\') {
        escaped[0] = '\\';
        escaped[1] = (char)c;
        put(line, escaped, 2);
    } else if (c < 0x20 || c == 0x7f) {
        put(line, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\u%04x", c));
    } else {
        put(line, (const char *)&c, 1);
    }
}

static bool is_number(const char *text, size_t bytes) {
    size_t digits = 0, dots = 0;
    for (size_t i = 0; i < bytes; i++) {
        if (text[i] >= '0' && text[i] <= '9')
            digits++;
        else if (text[i] == '.' && digits && i + 1 < bytes && !dots)
            dots++;
        else
            return false;
    }
    bool leading_zero = bytes > 1 && text[0] == '0' && text[1] != '.';
    return digits > 0 && digits < 16 && !leading_zero;
}

/* A byte that is nowhere in the details; '"' if there is none. */
static char absent(const char *details) {
    for (int c = 1; c < ' '; c++)
        if (!strchr(details, c))
            return (char)c;
    return '"';
}

/* The details once more, with another mark where the format has quotes: then those that are in a
 * value do not end it. ret_mark: the mark. */
static void mark_quotes(char details[DETAILS_MAX_BYTES], const char *format, va_list arguments,
                        char *ret_mark) {
    char marked[FORMAT_MAX_BYTES];
    size_t bytes = strlen(format);
    *ret_mark = absent(details);
    if (bytes >= sizeof marked || !strchr(details, '"'))
        return;
    for (size_t i = 0; i <= bytes; i++)
        marked[i] = format[i] == '"' ? *ret_mark : format[i];
    if (vsnprintf(details, DETAILS_MAX_BYTES, marked, arguments) < 0)
        details[0] = '\0';
}

/* key=value pairs, values with blanks in double quotes or between two marks, to ,"key":"value".
 * What is not a pair goes into "text". */
static void put_json_pairs(struct line *line, const char *details, char mark) {
    while (*details) {
        details += strspn(details, " ");
        size_t key = strcspn(details, "= ");
        if (details[key] != '=' || key == 0) {
            if (*details) {
                put_text(line, ",\"text\":\"");
                for (; *details; details++)
                    put_json_char(line, (unsigned char)*details);
                put_text(line, "\"");
            }
            return;
        }
        put_text(line, ",\"");
        for (size_t i = 0; i < key; i++)
            put_json_char(line, (unsigned char)details[i]);
        put_text(line, "\":");
        details += key + 1;
        bool quoted = *details == '"' || *details == mark;
        const char end[] = {quoted ? *details : ' ', '\0'};
        details += quoted;
        size_t value = strcspn(details, end);
        bool number = !quoted && is_number(details, value);
        put_text(line, number ? "" : "\"");
        for (size_t i = 0; i < value; i++)
            put_json_char(line, (unsigned char)details[i]);
        put_text(line, number ? "" : "\"");
        details += value + (quoted && details[value]);
    }
}

/* Where writing blocks: not without room. Pipes without a name are asked for that with the write
 * itself since Linux 6.5; the rest is asked first, and there a line of another process that takes
 * the last room in between makes this one wait. */
static ssize_t write_if_room(const struct line *line) {
    struct iovec part = {.iov_base = (void *)(uintptr_t)line->text, .iov_len = line->bytes};
    struct pollfd room = {.fd = settings.fd, .events = POLLOUT};
    ssize_t written = pwritev2(settings.fd, &part, 1, -1, RWF_NOWAIT);
    if (written >= 0 || (errno != EOPNOTSUPP && errno != ENOSYS && errno != EPERM))
        return written;
    if (poll(&room, 1, 0) > 0)
        return write(settings.fd, line->text, line->bytes);
    errno = EAGAIN;
    return -1;
}

static ssize_t write_once(const struct line *line) {
    if (settings.socket)
        return send(settings.fd, line->text, line->bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    return settings.blocks ? write_if_room(line) : write(settings.fd, line->text, line->bytes);
}

static void write_line(const struct line *line) {
    ssize_t written;
    do
        written = write_once(line);
    while (written < 0 && errno == EINTR);
    if (written != (ssize_t)line->bytes && settings.stats)
        kld_stats_add(settings.stats, KLD_STAT_log_lines_lost_total, 1);
}

/* A descriptor that does not block, without changing the one we share with our parent. */
static void open_output(void) {
    struct stat info;
    if (fstat(STDERR_FILENO, &info) < 0)
        return;
    settings.socket = S_ISSOCK(info.st_mode);
    if (S_ISFIFO(info.st_mode) || S_ISCHR(info.st_mode)) {
        int fd = open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
        if (settings.fd != STDERR_FILENO)
            close(settings.fd);
        settings.blocks = fd < 0;
        settings.fd = fd < 0 ? STDERR_FILENO : fd;
    }
}

/* LEVELS: there is none of this name. */
static size_t find_level(const char *level) {
    size_t found = 0;
    while (found < LEVELS && strcmp(level, level_names[found]) != 0)
        found++;
    return found;
}

void kld_log_set_level(const char *level) {
    size_t found = find_level(level);
    if (found < LEVELS)
        atomic_store_explicit(&settings.level, (uint32_t)found, memory_order_relaxed);
}

enum kld_status kld_log_init(const char *role, const char *level, const char *format,
                             struct kld_error *err) {
    if (find_level(level) == LEVELS)
        return kld_error_set(err, KLD_INVALID,
                             "log level '%.20s' is not one of debug, info, warn, error", level);
    bool json = strcmp(format, "json") == 0;
    if (!json && strcmp(format, "text") != 0)
        return kld_error_set(err, KLD_INVALID, "log format '%.20s' is not one of text, json",
                             format);
    kld_log_set_level(level);
    settings.json = json;
    snprintf(settings.role, sizeof settings.role, "%s", role);
    open_output();
    return KLD_OK;
}

void kld_log_count_lost_in(struct kld_stats *stats) { settings.stats = stats; }

bool kld_log_wants(enum kld_log_level level) {
    return (uint32_t)level >= atomic_load_explicit(&settings.level, memory_order_relaxed);
}

void kld_log(enum kld_log_level level, const char *event, const char *format, ...) {
    if (!kld_log_wants(level))
        return;
    int saved_errno = errno;
    char details[DETAILS_MAX_BYTES], mark = '"';
    va_list arguments;
    va_start(arguments, format);
    if (vsnprintf(details, sizeof details, format, arguments) < 0)
        details[0] = '\0';
    va_end(arguments);
    va_start(arguments, format);
    if (settings.json)
        mark_quotes(details, format, arguments, &mark);
    va_end(arguments);

    struct timespec now;
    struct tm utc;
    char stamp[40], day[24];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(day, sizeof day, "%Y-%m-%dT%H:%M:%S", &utc);
    snprintf(stamp, sizeof stamp, "%s.%03ldZ", day, now.tv_nsec / 1000000);

    struct line line = {.bytes = 0};
    char head[200];
    if (settings.json) {
        snprintf(head, sizeof head,
                 "{\"time\":\"%s\",\"level\":\"%s\",\"role\":\"%s\",\"pid\":%d,\"event\":\"%.60s\"",
                 stamp, level_names[level], settings.role, (int)getpid(), event);
        put_text(&line, head);
        put_json_pairs(&line, details, mark);
        if (line.bytes >= sizeof line.text - 8) { /* cut: an incomplete object helps nobody */
            line.bytes = 0;
            put_text(&line, head);
            put_text(&line, ",\"text\":\"details too long\"");
        }
        line.text[line.bytes++] = '}';
    } else {
        snprintf(head, sizeof head, "%s %-5s %s: %.60s%s", stamp, level_names[level], settings.role,
                 event, details[0] ? " " : "");
        put_text(&line, head);
        for (char *c = details; *c; c++) /* a line stays a line, a terminal stays as it was */
            if ((unsigned char)*c < 0x20 || *c == 0x7f)
                *c = '?';
        put_text(&line, details);
    }
    line.text[line.bytes++] = '\n';
    write_line(&line);
    errno = saved_errno;
}

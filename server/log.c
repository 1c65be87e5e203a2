/* log.c - formats one line an event and writes it with one write(2) to standard error.
 *
 * It never waits (output.h): what does not fit is dropped and counted. The settings below are
 * written once, by kld_log_init(), before a role starts threads, but for the level; after that any
 * thread logs. */
#include "server/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "proto/utf8.h"
#include "server/output.h"
#include "server/stats.h"

#define LINE_MAX_BYTES 2048 /* below PIPE_BUF: one write is never split */
#define DETAILS_MAX_BYTES 1024
#define FORMAT_MAX_BYTES 512 /* of a longer one, which there is not, quotes in values end them */

static const char *const level_names[] = {"debug", "info", "warn", "error"};
#define LEVELS (sizeof level_names / sizeof level_names[0])

static struct {
    _Atomic uint32_t level; /* enum kld_log_level */
    bool json;
    struct kld_output output;
    char role[16];
    struct kld_stats *stats;
} settings = {.level = KLD_LOG_INFO, .output = {.fd = STDERR_FILENO}, .role = "kld-server"};

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

/* What is no UTF-8, as a name of the environment may be, is U+FFFD each byte. */
static void put_json(struct line *line, const char *text, size_t bytes) {
    for (size_t i = 0, size; i < bytes; i += size) {
        unsigned char c = (unsigned char)text[i];
        char escaped[8];
        size = kld_utf8_sequence(text + i, bytes - i);
        if (!size) {
            size = 1;
            put_text(line, "\\ufffd");
        } else if (c == '"' || c == '\\') {
            put_text(line, "\\");
            put(line, text + i, 1);
        } else if (c < 0x20 || c == 0x7f) {
            put(line, escaped, (size_t)snprintf(escaped, sizeof escaped, "\\u%04x", c));
        } else {
            put(line, text + i, size);
        }
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
                put_json(line, details, strlen(details));
                put_text(line, "\"");
            }
            return;
        }
        put_text(line, ",\"");
        put_json(line, details, key);
        put_text(line, "\":");
        details += key + 1;
        bool quoted = *details == '"' || *details == mark;
        const char end[] = {quoted ? *details : ' ', '\0'};
        details += quoted;
        size_t value = strcspn(details, end);
        bool number = !quoted && is_number(details, value);
        put_text(line, number ? "" : "\"");
        put_json(line, details, value);
        put_text(line, number ? "" : "\"");
        details += value + (quoted && details[value]);
    }
}

static void write_line(const struct line *line) {
    ssize_t written = kld_output_write(&settings.output, line->text, line->bytes);
    if (written != (ssize_t)line->bytes && settings.stats)
        kld_stats_add(settings.stats, KLD_STAT_log_lines_lost_total, 1);
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
    if (settings.output.fd != STDERR_FILENO)
        close(settings.output.fd);
    kld_output_open(&settings.output, STDERR_FILENO);
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

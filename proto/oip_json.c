/* oip_json.c - the strict scanner in front of cJSON (oip_json.h says why there is one).
 * Decides nothing about what keys mean. No I/O; recursion is bounded by KLD_JSON_DEPTH_MAX. Runs in
 * the gateway: on its loop for small texts, on its thread pool for large ones. */
#include "proto/oip_json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "proto/digits.h"
#include "proto/utf8.h"

/* Where in the document a value is, as far as finding inputs[i].data needs it. */
enum path { AT_ROOT, AT_INPUTS, AT_INPUT, AT_DATA, AT_OTHER };
#define DATA_DEPTH 3 /* of what inputs[i].data lies in: the document, `inputs`, the input */

struct scan {
    const char *begin, *at, *end;
    int depth;
    struct kld_json_span *spans; /* NULL: not wanted */
    size_t input;                /* index of the element of `inputs` being read */
    struct kld_error *err;
};

static enum kld_status fail(const struct scan *scan, const char *what) {
    return kld_error_set(scan->err, KLD_INVALID, "the JSON is not valid: %s at byte %zu", what,
                         (size_t)(scan->at - scan->begin));
}

/* Here as in what follows: a pointer of its own stays in a register, scan->at does not. */
static const char *skip_blanks_at(const char *at, const char *end) {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r'))
        at++;
    return at;
}

static void skip_blanks(struct scan *scan) { scan->at = skip_blanks_at(scan->at, scan->end); }

static bool next_is(const struct scan *scan, char c) {
    return scan->at < scan->end && *scan->at == c;
}

static bool digit_at(const char *at, const char *end) {
    return at < end && *at >= '0' && *at <= '9';
}

/* Most of a request's bytes are digits. */
static const char *skip_digits(const char *at, const char *end) {
    while (end - at >= 8) {
        unsigned count = kld_digits_count(kld_digits_load(at));
        if (count < 8)
            return at + count;
        at += 8;
    }
    while (digit_at(at, end))
        at++;
    return at;
}

static bool hex4(struct scan *scan, uint32_t *ret_code) {
    uint32_t code = 0;
    if (scan->end - scan->at < 4)
        return false;
    for (int i = 0; i < 4; i++, scan->at++) {
        char c = *scan->at;
        uint32_t value;
        if (c >= '0' && c <= '9')
            value = (uint32_t)(c - '0');
        else if ((c | 0x20) >= 'a' && (c | 0x20) <= 'f')
            value = (uint32_t)((c | 0x20) - 'a' + 10);
        else
            return false;
        code = code << 4 | value;
    }
    *ret_code = code;
    return true;
}

static enum kld_status escape(struct scan *scan) {
    scan->at++; /* the backslash */
    if (scan->at == scan->end)
        return fail(scan, "a string without an end");
    char c = *scan->at++;
    if (c != 'u')
        return strchr("\"\\/bfnrt", c) && c ? KLD_OK : fail(scan, "an unknown escape");
    uint32_t code, low;
    if (!hex4(scan, &code))
        return fail(scan, "\\u without four hexadecimal digits");
    if (code == 0)
        return fail(scan, "\\u0000, which is not accepted,");
    if (code >= 0xdc00 && code <= 0xdfff)
        return fail(scan, "half of a surrogate pair");
    if (code < 0xd800 || code > 0xdbff)
        return KLD_OK;
    if (scan->end - scan->at < 2 || scan->at[0] != '\\' || scan->at[1] != 'u')
        return fail(scan, "half of a surrogate pair");
    scan->at += 2;
    if (!hex4(scan, &low) || low < 0xdc00 || low > 0xdfff)
        return fail(scan, "half of a surrogate pair");
    return KLD_OK;
}

/* To the first byte of a string that means something else than itself, or to the end. */
static const char *skip_plain(const char *at, const char *end) {
    for (; at < end; at++) {
        unsigned char c = (unsigned char)*at;
        if (c < 0x20 || c >= 0x80 || c == '"' || c == '\\')
            break;
    }
    return at;
}

static enum kld_status string(struct scan *scan) {
    if (!next_is(scan, '"'))
        return fail(scan, "expected a string");
    scan->at++;
    for (;;) {
        enum kld_status status;
        scan->at = skip_plain(scan->at, scan->end);
        if (scan->at == scan->end)
            return fail(scan, "a string without an end");
        unsigned char c = (unsigned char)*scan->at;
        if (c == '"') {
            scan->at++;
            return KLD_OK;
        }
        if (c < 0x20)
            return fail(scan, "a control character in a string");
        if (c == '\\') {
            if ((status = escape(scan)))
                return status;
        } else {
            size_t length = kld_utf8_sequence(scan->at, (size_t)(scan->end - scan->at));
            if (!length)
                return fail(scan, "a byte that is not UTF-8");
            scan->at += length;
        }
    }
}

/* Where the number ends, or *ret_fault says what is wrong with it there. */
static const char *skip_number(const char *at, const char *end, const char **ret_fault) {
    if (at < end && *at == '-')
        at++;
    if (!digit_at(at, end)) {
        *ret_fault = "expected a value (NaN and infinities are not JSON: send them binary)";
        return at;
    }
    at = *at == '0' ? at + 1 : skip_digits(at, end);
    if (at < end && *at == '.') {
        if (!digit_at(++at, end)) {
            *ret_fault = "a number without digits behind its point";
            return at;
        }
        at = skip_digits(at, end);
    }
    if (at < end && (*at == 'e' || *at == 'E')) {
        at++;
        if (at < end && (*at == '+' || *at == '-'))
            at++;
        if (!digit_at(at, end))
            *ret_fault = "a number without digits in its exponent";
        at = skip_digits(at, end);
    }
    return at;
}

static enum kld_status number(struct scan *scan) {
    const char *begin = scan->at, *fault = NULL;
    scan->at = skip_number(begin, scan->end, &fault);
    if (fault)
        return fail(scan, fault);
    return scan->at - begin <= KLD_JSON_NUMBER_MAX ? KLD_OK
                                                   : fail(scan, "a number of over 60 characters");
}

/* Past numbers of an array, each with its comma; the rest, be it wrong, is left to value(). Most of
 * a request's values are such. */
static const char *skip_numbers(const char *at, const char *end) {
    for (const char *next = at;; at = next) {
        const char *begin = skip_blanks_at(next, end), *fault = NULL;
        next = skip_number(begin, end, &fault);
        if (fault || next - begin > KLD_JSON_NUMBER_MAX)
            return at;
        next = skip_blanks_at(next, end);
        if (next == end || *next++ != ',')
            return at;
    }
}

static enum kld_status literal(struct scan *scan, const char *word) {
    size_t length = strlen(word);
    if ((size_t)(scan->end - scan->at) < length || memcmp(scan->at, word, length) != 0)
        return fail(scan, "expected a value");
    scan->at += length;
    return KLD_OK;
}

static enum kld_status value(struct scan *scan, enum path path);

/* A key that string() has passed, with its quotes: escapes are undone, as cJSON does in the rest.
 */
static bool key_is(const char *key, const char *end, const char *name) {
    struct scan scan = {.at = key + 1, .end = end - 1};
    for (; *name && scan.at < scan.end; name++) {
        uint32_t code = (unsigned char)*scan.at++;
        if (code == '\\' && *scan.at++ == 'u')
            (void)hex4(&scan, &code);
        if (code != (unsigned char)*name)
            return false;
    }
    return !*name && scan.at == scan.end;
}

static enum kld_status member(struct scan *scan, enum path path) {
    enum kld_status status;
    skip_blanks(scan);
    const char *key = scan->at;
    if ((status = string(scan)))
        return status;
    enum path below = AT_OTHER;
    if (path == AT_ROOT && key_is(key, scan->at, "inputs"))
        below = AT_INPUTS;
    else if (path == AT_INPUT && key_is(key, scan->at, "data"))
        below = AT_DATA;
    skip_blanks(scan);
    if (!next_is(scan, ':'))
        return fail(scan, "expected ':'");
    scan->at++;
    return value(scan, below);
}

/* An object or an array, from its first bracket past its last. */
static enum kld_status container(struct scan *scan, enum path path) {
    bool object = *scan->at == '{';
    char last = object ? '}' : ']';
    enum kld_status status;
    if (++scan->depth > KLD_JSON_DEPTH_MAX)
        return fail(scan, "more than 16 levels of nesting");
    scan->at++;
    skip_blanks(scan);
    if (next_is(scan, last)) {
        scan->at++, scan->depth--;
        return KLD_OK;
    }
    if (!object && path != AT_INPUTS)
        scan->at = skip_numbers(scan->at, scan->end);
    for (size_t index = 0;; index++) {
        if (!object && path == AT_INPUTS)
            scan->input = index;
        if (object)
            status = member(scan, path);
        else
            status = value(scan, path == AT_INPUTS ? AT_INPUT : AT_OTHER);
        if (status)
            return status;
        skip_blanks(scan);
        if (next_is(scan, last))
            break;
        if (!next_is(scan, ','))
            return fail(scan, object ? "expected ',' or '}'" : "expected ',' or ']'");
        scan->at++;
    }
    scan->at++, scan->depth--;
    return KLD_OK;
}

static enum kld_status value(struct scan *scan, enum path path) {
    skip_blanks(scan);
    if (scan->at == scan->end)
        return fail(scan, "it ends too early");
    const char *begin = scan->at;
    enum kld_status status;
    switch (*begin) {
    case '{': return container(scan, path == AT_INPUT || path == AT_ROOT ? path : AT_OTHER);
    case '[':
        if ((status = container(scan, path == AT_INPUTS ? path : AT_OTHER)))
            return status;
        if (path == AT_DATA && scan->spans && scan->input < KLD_JSON_ARRAYS_MAX &&
            !scan->spans[scan->input].begin)
            scan->spans[scan->input] = (struct kld_json_span){begin, scan->at};
        return KLD_OK;
    case '"': return string(scan);
    case 't': return literal(scan, "true");
    case 'f': return literal(scan, "false");
    case 'n': return literal(scan, "null");
    default: return number(scan);
    }
}

/* The text without what the spans hold, NUL-terminated. Spans are in the order of the text: the
 * first array of input i lies before that of input i + 1. */
static enum kld_status cut(const char *text, size_t bytes, const struct kld_json_span *spans,
                           char **ret_text, size_t *ret_bytes, struct kld_error *err) {
    size_t length = bytes;
    for (size_t i = 0; spans && i < KLD_JSON_ARRAYS_MAX; i++)
        if (spans[i].begin)
            length -= (size_t)(spans[i].end - spans[i].begin) - 2;
    if (length > KLD_JSON_SKELETON_MAX)
        return kld_error_set(err, KLD_TOO_LARGE,
                             "the JSON without its tensor data has %zu bytes; at most %zu", length,
                             KLD_JSON_SKELETON_MAX);
    char *copy = malloc(length + 1), *to = copy;
    if (!copy)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    const char *from = text;
    for (size_t i = 0; spans && i < KLD_JSON_ARRAYS_MAX; i++) {
        if (!spans[i].begin)
            continue;
        memcpy(to, from, (size_t)(spans[i].begin - from));
        to += spans[i].begin - from;
        *to++ = '[', *to++ = ']';
        from = spans[i].end;
    }
    memcpy(to, from, (size_t)(text + bytes - from));
    copy[length] = '\0';
    *ret_text = copy;
    *ret_bytes = length;
    return KLD_OK;
}

/* No object has two equal keys, or more keys than are ever needed (which bounds the comparing). */
static enum kld_status check_keys(const cJSON *item, struct kld_error *err) {
    const cJSON *child, *other;
    enum kld_status status;
    size_t keys = 0;
    cJSON_ArrayForEach(child, item) {
        if (cJSON_IsObject(item)) {
            if (++keys > KLD_JSON_KEYS_MAX)
                return kld_error_set(err, KLD_INVALID, "a JSON object has more than %d keys",
                                     KLD_JSON_KEYS_MAX);
            for (other = item->child; other != child; other = other->next)
                if (strcmp(child->string, other->string) == 0)
                    return kld_error_set(err, KLD_INVALID, "the JSON key '%.40s' is there twice",
                                         child->string);
        }
        if (child->child && (status = check_keys(child, err)))
            return status;
    }
    return KLD_OK;
}

enum kld_status kld_json_skeleton(const char *text, size_t bytes, char **ret_text,
                                  size_t *ret_bytes, struct kld_json_span *spans,
                                  struct kld_error *err) {
    struct scan scan = {.begin = text, .at = text, .end = text + bytes, .spans = spans, .err = err};
    if (spans)
        memset(spans, 0, KLD_JSON_ARRAYS_MAX * sizeof *spans);
    enum kld_status status = value(&scan, AT_ROOT);
    if (status)
        return status;
    skip_blanks(&scan);
    if (scan.at != scan.end)
        return fail(&scan, "something behind the value");
    for (size_t i = 1; spans && i < KLD_JSON_ARRAYS_MAX; i++)
        for (size_t j = 0; j < i; j++) /* two `inputs` keys: cut() relies on the order */
            if (spans[i].begin && spans[j].begin && spans[j].begin > spans[i].begin)
                return kld_error_set(err, KLD_INVALID, "the JSON key 'inputs' is there twice");
    return cut(text, bytes, spans, ret_text, ret_bytes, err);
}

static bool take_same(struct scan *scan, const char *wanted, size_t bytes) {
    if ((size_t)(scan->end - scan->at) < bytes || memcmp(scan->at, wanted, bytes) != 0)
        return false;
    scan->at += bytes;
    return true;
}

bool kld_json_is_again(const char *text, size_t bytes, const char *skeleton, size_t length,
                       const uint32_t *arrays, size_t count, struct kld_json_span *spans) {
    struct kld_error error;
    struct scan scan = {
        .begin = text, .at = text, .end = text + bytes, .depth = DATA_DEPTH, .err = &error};
    size_t done = 0; /* of the skeleton */
    for (size_t i = 0; i < count; i++) {
        spans[i].begin = spans[i].end = NULL;
        if (!arrays[i])
            continue;
        if (!take_same(&scan, skeleton + done, arrays[i] - done) || !next_is(&scan, '['))
            return false;
        spans[i].begin = scan.at;
        if (container(&scan, AT_OTHER))
            return false;
        spans[i].end = scan.at;
        done = arrays[i] + strlen("[]");
    }
    return take_same(&scan, skeleton + done, length - done) && scan.at == scan.end;
}

enum kld_status kld_json_tree(const char *skeleton, size_t bytes, cJSON **ret_root,
                              struct kld_error *err) {
    cJSON *root = cJSON_ParseWithLengthOpts(skeleton, bytes + 1, NULL, 1);
    if (!root)
        return kld_error_set(err, KLD_NO_MEMORY, "the JSON could not be read: out of memory");
    enum kld_status status = check_keys(root, err);
    if (status) {
        cJSON_Delete(root);
        return status;
    }
    *ret_root = root;
    return KLD_OK;
}

enum kld_status kld_json_parse(const char *text, size_t bytes, cJSON **ret_root,
                               struct kld_json_span *spans, struct kld_error *err) {
    char *skeleton = NULL;
    size_t length = 0;
    enum kld_status status = kld_json_skeleton(text, bytes, &skeleton, &length, spans, err);
    if (status)
        return status;
    status = kld_json_tree(skeleton, length, ret_root, err);
    free(skeleton);
    return status;
}

enum kld_status kld_json_whole(const cJSON *item, const char *what, uint64_t *ret_value,
                               struct kld_error *err) {
    double number = cJSON_IsNumber(item) ? item->valuedouble : -1;
    if (!(number >= 0 && number < 9007199254740992.0) || number != floor(number))
        return kld_error_set(err, KLD_INVALID, "%s must be a whole number from 0 to 2^53 - 1",
                             what);
    *ret_value = (uint64_t)number;
    return KLD_OK;
}

enum kld_status kld_json_keys(const cJSON *object, const char *what, const char *const *known,
                              struct kld_error *err) {
    const cJSON *child;
    cJSON_ArrayForEach(child, object) {
        size_t i = 0;
        while (known[i] && strcmp(known[i], child->string) != 0)
            i++;
        if (known[i])
            continue;
        char list[128] = "";
        for (i = 0; known[i]; i++) {
            strncat(list, i ? ", " : "", sizeof list - strlen(list) - 1);
            strncat(list, known[i], sizeof list - strlen(list) - 1);
        }
        return kld_error_set(err, KLD_INVALID, "%s: unknown key '%.40s'; known: %s", what,
                             child->string, list);
    }
    return KLD_OK;
}

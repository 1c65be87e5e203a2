/* unix_device.c - which worker of a server with several devices a connection talks to: the one
 * where its memory lies. A connection is with one worker at a time. As long as nothing of it lies
 * on a device it can go over to another: that is a lost worker whose next one waits elsewhere. The
 * thread that owns the connection. */
#include <stdio.h>
#include <string.h>

#include "client/unix.h"

#define AWAY_NS 1000000000ull /* a worker that was away is asked again after that */

/* Finds base_path, from the path that it was first greeted on and the device that was there; false:
 * that is a name of somebody's own, and where the others are is unknown. */
static bool find_base(struct unix_connection *u) {
    if (u->base_path[0])
        return true;
    char suffix[8];
    size_t length = strlen(u->path), bytes = 0;
    if (u->welcome.device > 0)
        bytes = (size_t)snprintf(suffix, sizeof suffix, ".%u", (unsigned)u->welcome.device);
    if (bytes && (length <= bytes || strcmp(u->path + length - bytes, suffix) != 0))
        return false;
    memcpy(u->base_path, u->path, length - bytes);
    u->base_path[length - bytes] = '\0';
    return true;
}

/* Where socket i lies; false: unknown, or the name would be too long. */
static bool path_of(struct unix_connection *u, uint32_t i, char ret_path[sizeof u->path]) {
    if (!find_base(u) || (i > 0 && strlen(u->base_path) + 4 >= sizeof u->path))
        return false;
    snprintf(ret_path, sizeof u->path, i > 0 ? "%.100s.%u" : "%.107s", u->base_path, i);
    return true;
}

/* Does anything of it lie on the device? but: a region or event that does not count. */
static bool holds_memory(const struct unix_connection *u, const void *but) {
    for (const struct kld_event *event = u->base.events; event; event = event->next)
        if (event != but)
            return true;
    for (const struct kld_region *base = u->base.regions; base; base = base->next) {
        const struct unix_region *region = (const struct unix_region *)base;
        if (base != but && !region->released &&
            (region->attached || region->kind != KLD_REGION_MEMFD))
            return true;
    }
    return u->publications;
}

/* Is anything of this process's memory used by the worker, as far as is known? */
static bool is_at_work(const struct unix_connection *u) {
    const struct kld_call *call = u->queued.first;
    while (call && !((const struct unix_call *)call)->fence)
        call = call->next;
    return u->sent.first || call;
}

static bool go_to(struct unix_connection *u, uint32_t i) {
    char path[sizeof u->path];
    if (!path_of(u, i, path))
        return false;
    kld_unix_lose(u);
    memcpy(u->path, path, sizeof u->path);
    u->welcome.device = (uint16_t)i; /* from now on, even if nobody answers there yet */
    u->down_since_ns = kld_now_ns(); /* nor was this one waited for before */
    kld_unix_connect(u);
    return true;
}

static uint32_t devices_of(const struct unix_connection *u) {
    uint32_t devices = u->welcomed ? u->welcome.devices : 0;
    return devices < KLD_WIRE_DEVICES_MAX ? devices : KLD_WIRE_DEVICES_MAX;
}

/* Which devices there are is known from the first greeting on. */
static enum kld_status wait_greeted(struct unix_connection *u, struct kld_error *err) {
    uint64_t deadline = kld_now_ns() + u->base.options.connect_timeout_ns;
    enum kld_status status = KLD_OK;
    while (!u->welcomed && !u->fatal.status && !status && kld_now_ns() < deadline)
        status = kld_connection_step(&u->base, deadline, err);
    kld_connection_waited(&u->base);
    if (u->welcomed || status)
        return status;
    return kld_unix_not_greeted(u, "", err);
}

/* Does this memory lie on another device of the server than the connection is to? On none of them:
 * the server says so itself. */
static bool lies_elsewhere(const struct unix_connection *u, const uint8_t *uuid,
                           uint32_t *ret_there) {
    const struct kld_wire_device *list = u->welcome.device_list;
    uint32_t here = u->welcome.device, there = 0, devices = devices_of(u);
    while (there < devices && memcmp(list[there].uuid, uuid, KLD_WIRE_UUID_BYTES) != 0)
        there++;
    *ret_there = there;
    return there < devices &&
           (here >= devices || memcmp(list[here].uuid, uuid, KLD_WIRE_UUID_BYTES) != 0);
}

enum kld_status kld_unix_go_to_memory(struct unix_connection *u, const uint8_t *uuid,
                                      const void *what, struct kld_error *err) {
    uint32_t there;
    enum kld_status status = wait_greeted(u, err);
    if (status || !lies_elsewhere(u, uuid, &there))
        return status;
    /* What is computed from this process's memory binds to no device once it has ended. */
    uint64_t deadline = kld_now_ns() + u->base.options.connect_timeout_ns;
    while (!status && is_at_work(u) && !holds_memory(u, what) && kld_now_ns() < deadline)
        status = kld_connection_step(&u->base, deadline, err);
    kld_connection_waited(&u->base);
    if (status || !lies_elsewhere(u, uuid, &there))
        return status;
    bool bound = holds_memory(u, what) || is_at_work(u);
    uint32_t here = u->welcome.device;
    if (bound && (u->welcome.flags & KLD_WELCOME_PEERS))
        return KLD_OK; /* the worker knows whether its card reaches that one */
    if (bound)
        return kld_error_set(err, KLD_INVALID,
                             "the memory lies on device %u of the server and what this connection "
                             "has on device %u; expected a connection of its own for each device",
                             there, here);
    if (!go_to(u, there))
        return kld_error_set(err, KLD_INVALID,
                             "the memory lies on device %u of the server and this connection is "
                             "to device %u; connect to the socket of device %u",
                             there, here, there);
    return KLD_OK;
}

bool kld_unix_look_further(struct unix_connection *u, struct unix_region *region) {
    uint32_t devices = devices_of(u), here = u->welcome.device;
    char path[sizeof u->path];
    if (devices < 2 || region->released || holds_memory(u, region) || is_at_work(u))
        return false;
    /* For a caller without any time each is looked at once. */
    bool only_look = !region->looks && kld_now_ns() >= region->until_ns;
    uint64_t deadline_ns = only_look ? KLD_NEVER : region->until_ns;
    for (uint32_t i = 1; i < devices && kld_now_ns() < deadline_ns; i++) {
        uint32_t there = (here + i) % devices;
        if (kld_now_ns() < u->away_until_ns[there] || !path_of(u, there, path))
            continue;
        enum unix_probe found = kld_unix_probe(u, path, deadline_ns, region);
        if (found == UNIX_PROBE_AWAY && kld_now_ns() < deadline_ns)
            u->away_until_ns[there] = kld_now_ns() + AWAY_NS;
        if (found == UNIX_PROBE_THERE)
            return go_to(u, there);
    }
    return false;
}

/* links.c - chooses the worker of each call (links.h). Sends nothing itself (link.c). A worker that
 * is just being replaced keeps its calls, because libkld sends them again; only when it does not
 * come back does another one get them. Loop thread only. */
#include "server/gateway/links.h"

#include <stdlib.h>

struct kld_links {
    struct kld_link_options options; /* of all */
    const struct kld_stats_page *page;
    uint32_t count, open; /* open: not yet closed again */
    uint32_t next;        /* where the search begins: equals get their turn */
    bool closing;
    struct kld_link *link[KLD_DEVICES_MAX];
    void (*closed)(void *user);
    void *closed_user;
};

static bool serves(const struct kld_links *links, uint32_t i) {
    return atomic_load(&links->page->device[i].ready) != 0;
}

/* but: not this one, if another serves. */
static struct kld_link *choose(struct kld_links *links, const struct kld_link *but) {
    uint32_t best = 0, best_load = UINT32_MAX;
    bool best_serves = false;
    for (uint32_t k = 0; k < links->count; k++) {
        uint32_t i = (links->next + k) % links->count, load = kld_link_load(links->link[i]);
        bool good = serves(links, i) && links->link[i] != but;
        if (best_load != UINT32_MAX &&
            (good < best_serves || (good == best_serves && load >= best_load)))
            continue;
        best = i;
        best_load = load;
        best_serves = good;
    }
    links->next = best + 1 < links->count ? best + 1 : 0;
    return links->link[best];
}

/* What ends as KLD_UNAVAILABLE was with no worker: libkld waited for one in vain. Nobody waits any
 * more for a call that is late: it is not worth another worker's time. */
static void call_ended(struct kld_link_call *call, enum kld_status status,
                       const struct kld_result *result, const struct kld_error *error) {
    struct kld_links *links = call->links;
    bool wanted = !call->pinned && !call->moved && !call->is_late && !links->closing;
    if (status == KLD_UNAVAILABLE && wanted) {
        struct kld_link *other = choose(links, call->link);
        if (other != call->link) {
            call->moved = true;
            kld_link_submit(other, call);
            return;
        }
    }
    call->done(call, status, result, error);
}

enum kld_status kld_links_open(uv_loop_t *loop, const struct kld_config *config,
                               struct kld_stats_page *page, struct kld_staging *staging,
                               struct kld_links **ret_links, struct kld_error *err) {
    struct kld_links *links = calloc(1, sizeof *links);
    if (!links)
        return kld_error_set(err, KLD_NO_MEMORY, "out of memory");
    links->options = (struct kld_link_options){.loop = loop,
                                               .config = config,
                                               .stats = &page->common,
                                               .page = page,
                                               .staging = staging,
                                               .ended = call_ended};
    links->page = page;
    uint32_t workers = kld_stats_workers(page);
    for (; links->count < workers; links->count++) {
        enum kld_status status =
            kld_link_open(&links->options, links->count, &links->link[links->count], err);
        if (status)
            return status; /* the process ends, and what was opened with it */
    }
    links->open = links->count;
    *ret_links = links;
    return KLD_OK;
}

static void link_closed(void *user) {
    struct kld_links *links = user;
    if (--links->open)
        return;
    links->closed(links->closed_user);
    free(links);
}

void kld_links_close(struct kld_links *links, void (*closed)(void *user), void *user) {
    links->closing = true;
    links->closed = closed;
    links->closed_user = user;
    uint32_t count = links->count; /* links may be gone with the last of them */
    for (uint32_t i = 0; i < count; i++)
        kld_link_close(links->link[i], link_closed, links);
}

uint32_t kld_links_count(const struct kld_links *links) { return links->count; }

bool kld_links_up(const struct kld_links *links) {
    for (uint32_t i = 0; i < links->count; i++)
        if (serves(links, i) && kld_link_is_up(links->link[i]))
            return true;
    return false;
}

bool kld_links_withdraw(struct kld_link_call *call) { return kld_link_withdraw(call); }

void kld_links_submit(struct kld_links *links, struct kld_link_call *call) {
    call->links = links;
    call->moved = false;
    kld_link_submit(call->pinned ? links->link[call->device] : choose(links, NULL), call);
}

void kld_links_hold(struct kld_links *links) { links->options.holds = true; }

void kld_links_send(struct kld_links *links) {
    links->options.holds = false;
    for (uint32_t i = 0; i < links->count; i++)
        kld_link_send(links->link[i]);
}

/* lingering.h - a socket whose last close does not return: it lingers for an hour over what its
 * peer does not read. Any thread; each function fails the test that calls it. */
#ifndef KLD_TESTS_LINGERING_H
#define KLD_TESTS_LINGERING_H

struct lingering {
    int fd;   /* the socket; -1 once it is hidden */
    int peer; /* who does not read */
};

struct lingering lingering_open(void);
/* Puts it in flight in a pair of sockets, and returns what is left of that: whoever closes it
 * closes the socket with it, unseen. */
int lingering_hide(struct lingering *lingering);
/* Has a close that lingers return. */
void lingering_let_go(struct lingering *lingering);
/* A packet of one byte with a descriptor, over a socket of AF_UNIX. */
void lingering_send_fd(int to, int fd);

#endif

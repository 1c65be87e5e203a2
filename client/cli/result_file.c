/* result_file.c - files that have no name until they are whole (result_file.h). */
#include "client/cli/result_file.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/xattr.h>
#include <unistd.h>

#define LINKS_MAX 40 /* as Linux follows them */
#define NAMES_TRIED 100
#define NAMED_MAX 8 /* more than there are results */
#define WRITE_BYTES (1u << 30)

static enum kld_status fail(const struct kld_result_file *file, const char *reason,
                            struct kld_error *err) {
    return kld_error_set(err, KLD_INVALID, "%.100s: cannot be written: %s", file->name, reason);
}

/* ---- Where it is ----------------------------------------------------------------------------- */

/* The folder of a path, and the name behind that; -1 with errno. */
static int open_folder(int at, char *path, char ret_base[NAME_MAX + 1]) {
    char *slash = strrchr(path, '/'), *base = slash ? slash + 1 : path;
    if (strlen(base) > NAME_MAX) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(ret_base, base, strlen(base) + 1);
    *base = '\0';
    return openat(at, *path ? path : ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
}

/* A link that somebody else put where everybody may: fs.protected_symlinks of proc(5), which the
 * kernel asks of links that it follows itself. */
static bool is_trap(const struct stat *folder, const struct stat *link) {
    return (folder->st_mode & S_ISVTX) && (folder->st_mode & S_IWOTH) &&
           link->st_uid != geteuid() && link->st_uid != folder->st_uid;
}

/* To where symbolic links lead, whether or not there is anything yet. False with errno. */
static bool find_place(struct kld_result_file *file) {
    struct stat link;
    char path[PATH_MAX];
    size_t length = strlen(file->name);
    int at = AT_FDCWD;
    if (length < sizeof path)
        memcpy(path, file->name, length + 1);
    for (unsigned links = 0; length < sizeof path && links <= LINKS_MAX; links++) {
        int before = file->folder;
        at = file->folder = open_folder(at, path, file->base);
        int reason = errno;
        if (before >= 0)
            close(before);
        errno = reason;
        if (at < 0)
            return false;
        ssize_t found = readlinkat(at, file->base, path, sizeof path);
        if (found < 0) /* it is no link, or not there */
            return errno == EINVAL || errno == ENOENT;
        if (fstat(at, &file->folder_is) != 0 ||
            fstatat(at, file->base, &link, AT_SYMLINK_NOFOLLOW) != 0)
            return false;
        if (is_trap(&file->folder_is, &link)) {
            errno = EACCES;
            return false;
        }
        length = (size_t)found;
        if (length < sizeof path)
            path[length] = '\0';
    }
    errno = length < sizeof path ? ELOOP : ENAMETOOLONG;
    return false;
}

/* A name that is taken, by a file that may be replaced. Renaming would not ask the file whether it
 * may be written, nor what it is. */
static enum kld_status look_at_old(struct kld_result_file *file, struct kld_error *err) {
    if (fstat(file->folder, &file->folder_is) != 0)
        return fail(file, strerror(errno), err);
    if (fstatat(file->folder, file->base, &file->was, AT_SYMLINK_NOFOLLOW) != 0)
        return errno == ENOENT ? KLD_OK : fail(file, strerror(errno), err);
    if (S_ISDIR(file->was.st_mode))
        return fail(file, strerror(EISDIR), err);
    if (!S_ISREG(file->was.st_mode))
        return fail(file, "what is there is not a regular file", err);
    if (faccessat(file->folder, file->base, W_OK, AT_EACCESS) != 0)
        return fail(file, strerror(errno), err);
    uid_t us = geteuid();
    if ((file->folder_is.st_mode & S_ISVTX) && us != 0 && us != file->was.st_uid &&
        us != file->folder_is.st_uid)
        return fail(file, "it is another user's, in a folder of all", err);
    file->replaces = true;
    return KLD_OK;
}

bool kld_result_file_same(const struct kld_result_file *file, const struct kld_result_file *other) {
    return file->folder_is.st_dev == other->folder_is.st_dev &&
           file->folder_is.st_ino == other->folder_is.st_ino &&
           strcmp(file->base, other->base) == 0;
}

/* ---- Making it ------------------------------------------------------------------------------- */

static void link_of(int fd, char ret_path[32]) { snprintf(ret_path, 32, "/proc/self/fd/%d", fd); }

/* -1: there are none here, or nothing to name them by later. */
static int open_nameless(const struct kld_result_file *file) {
    char path[32];
    int fd = openat(file->folder, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666);
    link_of(fd, path);
    if (fd >= 0 && access(path, F_OK) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Short, so that it fits where the result's does. */
static void make_name(struct kld_result_file *file) {
    uint64_t number = 0;
    if (getrandom(&number, sizeof number, GRND_NONBLOCK) < 0)
        number = (uint64_t)getpid();
    snprintf(file->beside, sizeof file->beside, ".kld-%016" PRIx64, number);
}

/* ---- What has a name before it is whole, and a signal that ends us ----------------------------
 */

static struct kld_result_file *volatile named[NAMED_MAX];
static pthread_t writer;

/* Removes them, and has it end us as ever. On the thread that makes them, which goes on no more:
 * beside another one it could make the next. */
static void on_end(int number) {
    if (pthread_self() != writer) { /* pthread_equal() is none that a handler may call */
        pthread_kill(writer, number);
        return;
    }
    for (size_t i = 0; i < NAMED_MAX; i++)
        if (named[i] && named[i]->beside[0])
            unlinkat(named[i]->folder, named[i]->beside, 0);
    signal(number, SIG_DFL);
    raise(number);
}

/* `to` in the place of `from`; NULL: of none. */
static void note_named(struct kld_result_file *from, struct kld_result_file *to) {
    static const int ending[] = {SIGINT, SIGTERM, SIGHUP};
    size_t place = 0;
    writer = pthread_self();
    while (place < NAMED_MAX && named[place] != from)
        place++;
    if (place < NAMED_MAX)
        named[place] = to;
    for (size_t i = 0; i < sizeof ending / sizeof ending[0] && to; i++) {
        struct sigaction was;
        if (sigaction(ending[i], NULL, &was) == 0 && was.sa_handler == SIG_DFL)
            signal(ending[i], on_end); /* one that is ignored stays so */
    }
}

/* ---- Making it, with or without a name --------------------------------------------------------*/

/* With errno where it fails. */
static bool open_beside(struct kld_result_file *file) {
    for (int i = 0; i < NAMES_TRIED; i++) {
        make_name(file);
        file->fd = openat(file->folder, file->beside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC,
                          file->replaces ? 0600 : 0666);
        if (file->fd >= 0)
            return true;
        if (errno != EEXIST)
            break;
    }
    file->beside[0] = '\0';
    return false;
}

static void remove_beside(struct kld_result_file *file) {
    if (file->beside[0])
        unlinkat(file->folder, file->beside, 0);
    file->beside[0] = '\0';
}

static void close_fd(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static enum kld_status make(struct kld_result_file *file, uint64_t bytes, struct kld_error *err) {
    file->fd = open_nameless(file);
    if (file->fd >= 0) {
        bool full = fallocate(file->fd, 0, 0, (off_t)bytes) != 0 &&
                    (errno == ENOSPC || errno == EDQUOT || errno == EFBIG);
        return full ? fail(file, strerror(errno), err) : KLD_OK;
    }
    /* Only whether it can be: what has a name would stay if we were killed while it is computed. */
    note_named(NULL, file);
    if (!open_beside(file))
        return fail(file, strerror(errno), err);
    remove_beside(file);
    close_fd(&file->fd);
    return KLD_OK;
}

enum kld_status kld_result_file_open(const char *name, uint64_t bytes,
                                     struct kld_result_file *ret_file, struct kld_error *err) {
    memset(ret_file, 0, sizeof *ret_file);
    ret_file->name = name;
    ret_file->folder = ret_file->fd = -1;
    enum kld_status status = KLD_OK;
    if (!find_place(ret_file))
        status = fail(ret_file, strerror(errno), err);
    if (!status)
        status = look_at_old(ret_file, err);
    if (!status)
        status = make(ret_file, bytes, err);
    if (status)
        kld_result_file_close(ret_file);
    return status;
}

void kld_result_file_close(struct kld_result_file *file) {
    if (!file->name)
        return;
    note_named(file, NULL);
    remove_beside(file);
    close_fd(&file->fd);
    close_fd(&file->folder);
    memset(file, 0, sizeof *file);
}

/* ---- Filling it ------------------------------------------------------------------------------ */

static bool write_all(int fd, const char *from, uint64_t bytes) {
    while (bytes > 0) {
        ssize_t count = write(fd, from, bytes < WRITE_BYTES ? bytes : WRITE_BYTES);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return false;
        from += count;
        bytes -= (uint64_t)count;
    }
    return true;
}

#define ACL "system.posix_acl_access"
#define ACL_BYTES_MAX 4096

/* The list of who else may use the file that is replaced. False: there is one, and it cannot be
 * copied. Without one, what the folder gives to its new files goes. */
static bool keep_list(const struct kld_result_file *file) {
    char path[32 + NAME_MAX], list[ACL_BYTES_MAX];
    snprintf(path, sizeof path, "/proc/self/fd/%d/%s", file->folder, file->base);
    ssize_t bytes = lgetxattr(path, ACL, list, sizeof list);
    bool there = bytes >= 0 || errno == ERANGE || errno == E2BIG;
    if (bytes >= 0 && fsetxattr(file->fd, ACL, list, (size_t)bytes, 0) == 0)
        return true;
    fremovexattr(file->fd, ACL);
    return !there;
}

/* Those of the file that it replaces. A group that we may not give it is not to lend its rights to
 * another one. */
static bool keep_rights(const struct kld_result_file *file) {
    const struct stat *was = &file->was;
    mode_t mode = was->st_mode & 0777;
    struct stat is;
    if (!file->replaces)
        return true;
    if (fstat(file->fd, &is) != 0)
        return false;
    bool lost = (is.st_uid != was->st_uid || is.st_gid != was->st_gid) &&
                fchown(file->fd, was->st_uid, was->st_gid) != 0 && is.st_gid != was->st_gid &&
                fchown(file->fd, (uid_t)-1, was->st_gid) != 0;
    if (lost)
        fremovexattr(file->fd, ACL);
    /* Where there is a list, what looks like the group's is the most that it gives. */
    if (lost || !keep_list(file))
        mode &= (mode_t)~S_IRWXG;
    return fchmod(file->fd, mode) == 0;
}

enum kld_status kld_result_file_write(struct kld_result_file *file, const void *header,
                                      size_t header_bytes, const void *data, uint64_t bytes,
                                      struct kld_error *err) {
    bool ok = (file->fd >= 0 || open_beside(file)) && write_all(file->fd, header, header_bytes) &&
              write_all(file->fd, data, bytes) && keep_rights(file);
    return ok ? KLD_OK : fail(file, strerror(errno), err);
}

static bool link_as(const struct kld_result_file *file, const char *name) {
    char path[32];
    link_of(file->fd, path);
    return linkat(AT_FDCWD, path, file->folder, name, AT_SYMLINK_FOLLOW) == 0;
}

/* A name that is taken is taken over by a rename alone. */
static bool name_it(struct kld_result_file *file) {
    if (file->beside[0]) { /* closing tells what a server of files found */
        int fd = file->fd;
        file->fd = -1;
        if (close(fd) != 0)
            return false;
    } else {
        if (!file->replaces && link_as(file, file->base))
            return true;
        make_name(file);
        if (!link_as(file, file->beside)) {
            file->beside[0] = '\0'; /* another's, should there be one */
            return false;
        }
    }
    if (renameat(file->folder, file->beside, file->folder, file->base) != 0)
        return false;
    file->beside[0] = '\0';
    return true;
}

enum kld_status kld_result_file_place(struct kld_result_file *file, struct kld_error *err) {
    return name_it(file) ? KLD_OK : fail(file, strerror(errno), err);
}

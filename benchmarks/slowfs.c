/* slowfs: serves a folder over FUSE, as slowly as it is told. Started by scripts/slowfs, which mounts.
 *
 * What   Every open takes `latency` longer, the bytes of all readers and writers go through one pipe of `bandwidth`
 *        bytes a second, nothing is cached, and /.slowfs-stats at the root of the mount counts opens, reads, writes and
 *        bytes, as JSON. It is mounted read-only unless `writable`; then what writes files safely works: create,
 *        write, truncate, fsync of files and folders, rename, remove, mkdir, rmdir. No links, no locks,
 *        no attributes of a file that is open and has no name any more.
 * How    Speaks the kernel's protocol, <linux/fuse.h>, without libfuse: a dozen requests suffice, and a C compiler is
 *        all it takes to build. One thread answers one request from beginning to end, sleeps included; when the last
 *        idle thread takes a request it starts another, up to MAX_THREADS. So sleeps overlap.
 * Pipe   A token bucket of depth zero, booked ahead: a read is delivered when its last byte is out of the pipe. n bytes
 *        never take less than n / bandwidth, two readers get half each, and idle time saves up no credit.
 * Price  At full speed 20 to 75 µs for open, read and close of 30 KB; 3 GB/s where the folder itself gives 7. Method,
 *        machine, limits, and the figures of libfuse and Python: docs/decisions/0007-slow-storage.md.
 * Invariant: what a reader got, and what a writer was told is written, had waited and been counted before.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { MAX_THREADS = 1024, DATA_BYTES = 1 << 20, NUM_BUCKETS = 1 << 18, ATTRIBUTE_SECONDS = 60 };
static const char STATS_NAME[] = ".slowfs-stats";

static int device, source;                                  /* /dev/fuse, mounted; the folder that is served */
static uint64_t latency_ns, bandwidth;                      /* bandwidth in bytes per second; 0: no limit */
static bool writable;
static atomic_ullong num_opens, num_reads, read_bytes, num_writes, written_bytes;
static atomic_int num_threads, num_idle;
static atomic_bool shared_mmap;                             /* whether this kernel maps our files MAP_SHARED */

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void sleep_until(uint64_t ns) {
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) continue;
}

/* When the last of `bytes` that arrived at `arrived_ns` is out of the pipe; what is booked later queues behind. */
static uint64_t book_pipe(uint64_t arrived_ns, uint64_t bytes) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static uint64_t free_ns;
    pthread_mutex_lock(&lock);
    if (free_ns < arrived_ns) free_ns = arrived_ns;
    uint64_t done_ns = free_ns += bytes * 1000000000u / bandwidth;
    pthread_mutex_unlock(&lock);
    return done_ns;
}

/* What the kernel calls by number we know by path; a node lives as long as the kernel remembers it. */
struct node {
    struct node *next;                                      /* in its bucket */
    uint64_t num_lookups;                                   /* taken back by FORGET */
    char *_Atomic path;                                     /* relative to source; "." for the root */
};

static struct node *buckets[NUM_BUCKETS];
static pthread_mutex_t nodes_lock = PTHREAD_MUTEX_INITIALIZER;
static const char *path_of(uint64_t id) { return id == FUSE_ROOT_ID ? "." : ((struct node *)(uintptr_t)id)->path; }
static bool is_stats(uint64_t id) { return strcmp(path_of(id), STATS_NAME) == 0; }

static struct node **bucket_of(const char *path) {
    uint64_t hash = 14695981039346656037u;                  /* FNV-1a */
    for (; *path; path++) hash = (hash ^ (unsigned char)*path) * 1099511628211u;
    return &buckets[(hash ^ hash >> 32) % NUM_BUCKETS];
}

static uint64_t remember(const char *path) {
    struct node **bucket = bucket_of(path), *node;
    pthread_mutex_lock(&nodes_lock);
    for (node = *bucket; node && strcmp(node->path, path); node = node->next) continue;
    if (!node && (node = calloc(1, sizeof *node))) {
        if (!(node->path = strdup(path))) abort();          /* 100 bytes could not be had: nothing will work */
        node->next = *bucket;
        *bucket = node;
    }
    if (node) node->num_lookups++;
    pthread_mutex_unlock(&nodes_lock);
    return (uint64_t)(uintptr_t)node;
}

static void forget(const struct fuse_forget_one *one, uint32_t count) {
    pthread_mutex_lock(&nodes_lock);
    for (; count--; one++) {
        struct node *node = (struct node *)(uintptr_t)one->nodeid, **link;
        if (one->nodeid == FUSE_ROOT_ID || (node->num_lookups -= one->nlookup)) continue;
        for (link = bucket_of(node->path); *link != node;) link = &(*link)->next;
        *link = node->next;
        free(node->path);
        free(node);
    }
    pthread_mutex_unlock(&nodes_lock);
}

/* Gives a node another path. The old string stays in memory: another request may be reading it, and renames are few. */
static void move_node(struct node **link, const char *path) {
    struct node *node = *link, **bucket = bucket_of(path);
    *link = node->next;
    if (!(node->path = strdup(path))) abort();
    node->next = *bucket;
    *bucket = node;
}

/* What was known as `path`, and below it, is known as `to` from now on, or not at all: then `to` is GONE. */
static const char GONE[] = ".slowfs-stats/gone";            /* nothing can be made there */
static void moved(const char *path, const char *to) {
    size_t length = strlen(path);
    char inner[2 * PATH_MAX];
    pthread_mutex_lock(&nodes_lock);
    for (struct node **bucket = buckets; bucket < buckets + NUM_BUCKETS; bucket++)
        for (struct node **link = bucket; *link;) {
            const char *known = (*link)->path;
            if (strncmp(known, path, length) || (known[length] && known[length] != '/')) {
                link = &(*link)->next;
                continue;
            }
            snprintf(inner, sizeof inner, "%s%s", to, to == GONE ? "" : known + length);
            move_node(link, inner);
        }
    pthread_mutex_unlock(&nodes_lock);
}

/* Sends an errno, or 0 and data. Returns whether the kernel took it; not so when the reader was killed meanwhile. */
static bool reply(const struct fuse_in_header *to, int error, const void *data, size_t length) {
    if (error) length = 0;
    struct fuse_out_header head = {.len = (uint32_t)(sizeof head + length), .error = -error, .unique = to->unique};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)data, length}};
    return writev(device, parts, length ? 2 : 1) >= 0;
}

static int write_stats(int fd) {
    return dprintf(fd, "{\"num_opens\": %llu, \"num_reads\": %llu, \"read_bytes\": %llu, \"num_writes\": %llu, "
                   "\"written_bytes\": %llu, \"shared_mmap\": %s}\n", num_opens, num_reads, read_bytes, num_writes,
                   written_bytes, shared_mmap ? "true" : "false");
}

/* Fills in what a path looks like from outside; returns 0 or an errno. */
static int attributes_of(const char *path, struct fuse_attr *attr) {
    struct stat st, target;
    if (strcmp(path, STATS_NAME) == 0) {                    /* size 0, like a file of /proc: read it to the end */
        if (fstat(source, &st)) return errno;
        st.st_mode = S_IFREG | 0400, st.st_size = st.st_blocks = 0, st.st_nlink = 1, st.st_ino = UINT64_MAX;
    } else {
        if (fstatat(source, path, &st, AT_SYMLINK_NOFOLLOW)) return errno;
        /* A link to a file is shown as that file, lest an absolute one lead readers out of the slow storage. */
        if (S_ISLNK(st.st_mode) && !fstatat(source, path, &target, 0) && S_ISREG(target.st_mode)) st = target;
    }
    *attr = (struct fuse_attr){
        .ino = st.st_ino, .size = (uint64_t)st.st_size, .blocks = (uint64_t)st.st_blocks, .mode = st.st_mode,
        .nlink = (uint32_t)st.st_nlink, .uid = st.st_uid, .gid = st.st_gid, .blksize = (uint32_t)st.st_blksize,
        .atime = (uint64_t)st.st_atim.tv_sec, .atimensec = (uint32_t)st.st_atim.tv_nsec,
        .mtime = (uint64_t)st.st_mtim.tv_sec, .mtimensec = (uint32_t)st.st_mtim.tv_nsec,
        .ctime = (uint64_t)st.st_ctim.tv_sec, .ctimensec = (uint32_t)st.st_ctim.tv_nsec,
    };
    return 0;
}

static void serve_init(const struct fuse_in_header *head, const struct fuse_init_in *in) {
    /* FUSE_DIRECT_IO_ALLOW_MMAP (Linux 6.6) is in a second word of flags (5.17). Older headers name neither, so both
     * are found by position: word 4 of the question and word 8 of the answer. */
    const uint32_t *asked = (const uint32_t *)in, extended = 1u << 30, allow_mmap = 1u << 4;
    struct fuse_init_out out = {
        .major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION, .max_readahead = in->max_readahead,
        .flags = in->flags & (FUSE_ASYNC_READ | FUSE_PARALLEL_DIROPS | FUSE_MAX_PAGES | FUSE_BIG_WRITES),
        .max_background = MAX_THREADS, .congestion_threshold = MAX_THREADS, .max_write = writable ? DATA_BYTES : 4096,
        .time_gran = 1,
        .max_pages = (uint16_t)(DATA_BYTES / sysconf(_SC_PAGESIZE)),
    };
    if (head->len >= sizeof *head + 5 * sizeof *asked && in->flags & extended && asked[4] & allow_mmap) {
        out.flags |= extended;
        memcpy((char *)&out + 8 * sizeof *asked, &allow_mmap, sizeof allow_mmap);
        shared_mmap = true;
    }
    reply(head, in->major == FUSE_KERNEL_VERSION ? 0 : EPROTO, &out, sizeof out);
}

/* The path of a name in a folder; returns 0 or an errno. */
static int path_in(char *path, uint64_t folder, const char *name) {
    bool in_root = folder == FUSE_ROOT_ID;
    int length = snprintf(path, PATH_MAX, "%s%s%s", in_root ? "" : path_of(folder), in_root ? "" : "/", name);
    return length < PATH_MAX ? 0 : ENAMETOOLONG;
}

/* Tells the kernel of a path, after an error or none; with `open`, of a file opened there too. Returns whether it took. */
static bool reply_entry(const struct fuse_in_header *head, int error, const char *path, const struct fuse_open_out *open) {
    struct { struct fuse_entry_out entry; struct fuse_open_out open; } out = {
        .entry = {.entry_valid = ATTRIBUTE_SECONDS, .attr_valid = ATTRIBUTE_SECONDS}};
    if (!error) error = attributes_of(path, &out.entry.attr);
    if (!error && !(out.entry.nodeid = remember(path))) error = ENOMEM;
    if (open) out.open = *open;
    bool took = reply(head, error, &out, open ? sizeof out : sizeof out.entry);
    if (!took && !error) forget(&(struct fuse_forget_one){out.entry.nodeid, 1}, 1);
    return took && !error;
}

static void serve_lookup(const struct fuse_in_header *head, const char *name) {
    char path[PATH_MAX];
    int error = path_in(path, head->nodeid, name);
    reply_entry(head, error, path, NULL);
}

static void reply_attributes(const struct fuse_in_header *head, int error) {
    struct fuse_attr_out out = {.attr_valid = ATTRIBUTE_SECONDS};
    if (!error) error = attributes_of(path_of(head->nodeid), &out.attr);
    reply(head, error, &out, sizeof out);
}

static void serve_readlink(const struct fuse_in_header *head, char *data) {
    ssize_t length = readlinkat(source, path_of(head->nodeid), data, PATH_MAX);
    reply(head, length < 0 ? errno : 0, data, (size_t)length);
}

static void serve_open(const struct fuse_in_header *head, const struct fuse_open_in *in) {
    uint64_t arrived_ns = now_ns();
    struct fuse_open_out out = {.open_flags = FOPEN_DIRECT_IO};
    bool stats = is_stats(head->nodeid);                    /* neither slow nor counted, and fixed while it is open */
    const char *path = path_of(head->nodeid);
    int fd = stats ? memfd_create(path, MFD_CLOEXEC) : openat(source, path, (int)(in->flags & O_ACCMODE) | O_CLOEXEC);
    int error = fd < 0 ? errno : 0;
    if (stats && !error && write_stats(fd) < 0) error = errno;
    if (!stats && latency_ns) sleep_until(arrived_ns + latency_ns);
    if (!stats && !error) num_opens++;
    out.fh = (uint64_t)fd;
    if ((!reply(head, error, &out, sizeof out) || error) && fd >= 0) close(fd);
}

static void serve_read(const struct fuse_in_header *head, const struct fuse_read_in *in, char *data) {
    uint64_t arrived_ns = now_ns();
    ssize_t length = pread((int)in->fh, data, in->size < DATA_BYTES ? in->size : DATA_BYTES, (off_t)in->offset);
    int error = length < 0 ? errno : 0;
    if (!is_stats(head->nodeid) && !error) {
        if (bandwidth && length) sleep_until(book_pipe(arrived_ns, (uint64_t)length));
        num_reads++;
        read_bytes += (uint64_t)length;
    }
    reply(head, error, data, (size_t)length);
}

static void serve_opendir(const struct fuse_in_header *head) {
    int fd = openat(source, path_of(head->nodeid), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folder = fd < 0 ? NULL : fdopendir(fd);
    struct fuse_open_out out = {.fh = (uint64_t)(uintptr_t)folder};
    if (!reply(head, folder ? 0 : errno, &out, sizeof out) && folder) closedir(folder);
}

static void serve_readdir(const struct fuse_in_header *head, const struct fuse_read_in *in, char *data) {
    DIR *folder = (DIR *)(uintptr_t)in->fh;                 /* the kernel lists one open folder one request at a time */
    size_t length = 0, limit = in->size < DATA_BYTES ? in->size : DATA_BYTES;
    seekdir(folder, (long)in->offset);
    for (struct dirent *entry; (entry = readdir(folder));) {
        struct fuse_dirent *out = (struct fuse_dirent *)(data + length);
        size_t name_length = strlen(entry->d_name), next = length + FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + name_length);
        if (next > limit) break;
        memset(out, 0, next - length);
        out->ino = entry->d_ino, out->off = (uint64_t)entry->d_off, out->namelen = (uint32_t)name_length;
        out->type = entry->d_type == DT_LNK ? DT_UNKNOWN : entry->d_type;  /* it may be shown as a file: let them ask */
        memcpy(out->name, entry->d_name, name_length);
        length = next;
    }
    reply(head, 0, data, length);
}

static void serve_statfs(const struct fuse_in_header *head) {
    struct statvfs st = {0};
    int error = fstatvfs(source, &st) ? errno : 0;
    struct fuse_statfs_out out = {.st = {
        .blocks = st.f_blocks, .bfree = st.f_bfree, .bavail = st.f_bavail, .files = st.f_files, .ffree = st.f_ffree,
        .bsize = (uint32_t)st.f_bsize, .frsize = (uint32_t)st.f_frsize, .namelen = NAME_MAX}};
    reply(head, error, &out, sizeof out);
}

/* From here on to serve(): what only a writable mount answers. Mode bits come with the umask already taken off. */
static void serve_create(const struct fuse_in_header *head, const struct fuse_create_in *in) {
    uint64_t arrived_ns = now_ns();
    char path[PATH_MAX];
    int error = path_in(path, head->nodeid, (const char *)(in + 1)), fd = -1;
    int flags = (int)in->flags & (O_ACCMODE | O_EXCL | O_TRUNC);  /* O_DIRECT is between the writer and us */
    if (!error && strcmp(path, STATS_NAME) == 0) error = EPERM;
    if (!error && (fd = openat(source, path, flags | O_CREAT | O_CLOEXEC, in->mode & 07777)) < 0) error = errno;
    if (latency_ns) sleep_until(arrived_ns + latency_ns);
    if (!error) num_opens++;
    struct fuse_open_out out = {.fh = (uint64_t)fd, .open_flags = FOPEN_DIRECT_IO};
    if (!reply_entry(head, error, path, &out) && fd >= 0) close(fd);
}

static void serve_write(const struct fuse_in_header *head, const struct fuse_write_in *in) {
    uint64_t arrived_ns = now_ns();
    ssize_t length = pwrite((int)in->fh, in + 1, in->size, (off_t)in->offset);
    int error = length < 0 ? errno : 0;
    if (!error) {
        if (bandwidth && length) sleep_until(book_pipe(arrived_ns, (uint64_t)length));
        num_writes++;
        written_bytes += (uint64_t)length;
    }
    struct fuse_write_out out = {.size = (uint32_t)length};
    reply(head, error, &out, sizeof out);
}

static void serve_setattr(const struct fuse_in_header *head, const struct fuse_setattr_in *in) {
    const char *path = path_of(head->nodeid);
    bool by_file = in->valid & FATTR_FH;
    int error = is_stats(head->nodeid) ? EPERM : 0, fd = by_file ? (int)in->fh : -1;
    if (!error && in->valid & FATTR_SIZE) {
        if (!by_file && (fd = openat(source, path, O_WRONLY | O_CLOEXEC)) < 0) error = errno;
        if (!error && ftruncate(fd, (off_t)in->size)) error = errno;
        if (!by_file && fd >= 0) close(fd);
    }
    if (!error && in->valid & FATTR_MODE && fchmodat(source, path, in->mode & 07777, 0)) error = errno;
    uid_t uid = in->valid & FATTR_UID ? in->uid : (uid_t)-1;
    gid_t gid = in->valid & FATTR_GID ? in->gid : (gid_t)-1;
    if (!error && in->valid & (FATTR_UID | FATTR_GID) && fchownat(source, path, uid, gid, 0)) error = errno;
    if (!error && in->valid & (FATTR_ATIME | FATTR_MTIME)) {
        struct timespec times[] = {{(time_t)in->atime, in->atimensec}, {(time_t)in->mtime, in->mtimensec}};
        if (in->valid & FATTR_ATIME_NOW) times[0].tv_nsec = UTIME_NOW;
        if (in->valid & FATTR_MTIME_NOW) times[1].tv_nsec = UTIME_NOW;
        if (!(in->valid & FATTR_ATIME)) times[0].tv_nsec = UTIME_OMIT;
        if (!(in->valid & FATTR_MTIME)) times[1].tv_nsec = UTIME_OMIT;
        if (utimensat(source, path, times, 0)) error = errno;
    }
    reply_attributes(head, error);
}

static void serve_mkdir(const struct fuse_in_header *head, const struct fuse_mkdir_in *in) {
    char path[PATH_MAX];
    int error = path_in(path, head->nodeid, (const char *)(in + 1));
    if (!error && mkdirat(source, path, in->mode & 07777)) error = errno;
    reply_entry(head, error, path, NULL);
}

static void serve_remove(const struct fuse_in_header *head, const char *name, int flags) {
    char path[PATH_MAX];
    int error = path_in(path, head->nodeid, name);
    if (!error && strcmp(path, STATS_NAME) == 0) error = EPERM;
    if (!error && unlinkat(source, path, flags)) error = errno;
    if (!error) moved(path, GONE);
    reply(head, error, NULL, 0);
}

static void serve_rename(const struct fuse_in_header *head, uint64_t folder, unsigned flags, const char *name) {
    char old[PATH_MAX], new[PATH_MAX];
    int error = path_in(old, head->nodeid, name);
    if (!error) error = path_in(new, folder, name + strlen(name) + 1);
    if (!error && (strcmp(old, STATS_NAME) == 0 || strcmp(new, STATS_NAME) == 0)) error = EPERM;
    if (!error && flags & ~(unsigned)RENAME_NOREPLACE) error = EINVAL;
    if (!error && renameat2(source, old, source, new, flags)) error = errno;
    if (!error && strcmp(old, new)) moved(new, GONE), moved(old, new);
    reply(head, error, NULL, 0);
}

static void serve_fsync(const struct fuse_in_header *head, const struct fuse_fsync_in *in) {
    int fd = head->opcode == FUSE_FSYNCDIR ? dirfd((DIR *)(uintptr_t)in->fh) : (int)in->fh;
    int failed = in->fsync_flags & 1 ? fdatasync(fd) : fsync(fd);
    reply(head, failed ? errno : 0, NULL, 0);
}

static bool serve_writer(const struct fuse_in_header *head, const void *body) {
    const struct fuse_rename_in *rename = body;
    const struct fuse_rename2_in *rename2 = body;
    switch (head->opcode) {
    case FUSE_CREATE: serve_create(head, body); break;
    case FUSE_WRITE: serve_write(head, body); break;
    case FUSE_SETATTR: serve_setattr(head, body); break;
    case FUSE_MKDIR: serve_mkdir(head, body); break;
    case FUSE_UNLINK: serve_remove(head, body, 0); break;
    case FUSE_RMDIR: serve_remove(head, body, AT_REMOVEDIR); break;
    case FUSE_RENAME: serve_rename(head, rename->newdir, 0, (const char *)(rename + 1)); break;
    case FUSE_RENAME2: serve_rename(head, rename2->newdir, rename2->flags, (const char *)(rename2 + 1)); break;
    case FUSE_FSYNC:
    case FUSE_FSYNCDIR: serve_fsync(head, body); break;
    default: return false;
    }
    return true;
}

static void serve(const struct fuse_in_header *head, const void *body, char *data) {
    const struct fuse_batch_forget_in *batch = body;
    const struct fuse_release_in *release = body;
    switch (head->opcode) {
    case FUSE_INIT: serve_init(head, body); break;
    case FUSE_LOOKUP: serve_lookup(head, body); break;
    case FUSE_FORGET: forget(&(struct fuse_forget_one){head->nodeid, *(const uint64_t *)body}, 1); break;
    case FUSE_BATCH_FORGET: forget((const void *)(batch + 1), batch->count); break;
    case FUSE_GETATTR: reply_attributes(head, 0); break;
    case FUSE_READLINK: serve_readlink(head, data); break;
    case FUSE_OPEN: serve_open(head, body); break;
    case FUSE_READ: serve_read(head, body, data); break;
    case FUSE_RELEASE: close((int)release->fh); reply(head, 0, NULL, 0); break;
    case FUSE_OPENDIR: serve_opendir(head); break;
    case FUSE_READDIR: serve_readdir(head, body, data); break;
    case FUSE_RELEASEDIR: closedir((DIR *)(uintptr_t)release->fh); reply(head, 0, NULL, 0); break;
    case FUSE_STATFS: serve_statfs(head); break;
    default:
        if (writable && serve_writer(head, body)) break;
        reply(head, ENOSYS, NULL, 0);                       /* the kernel remembers, and does not ask that again */
    }
}

static void start_thread(void *(*work)(void *)) {
    pthread_t thread;
    if (num_threads >= MAX_THREADS || pthread_create(&thread, NULL, work, NULL)) return;
    pthread_detach(thread);
    num_threads++;
}

static void *work(void *unused) {
    const size_t request_bytes = (64 << 10) + (writable ? DATA_BYTES : 0);
    char *request = malloc(request_bytes), *data = malloc(DATA_BYTES);  /* real memory is given where first touched */
    while (request && data) {
        num_idle++;
        bool got = read(device, request, request_bytes) >= 0, was_last = num_idle-- == 1;
        if (!got && errno != EINTR && errno != EAGAIN && errno != ENOENT) break;  /* ENODEV: unmounted */
        if (got && was_last) start_thread(work);
        if (got) serve((struct fuse_in_header *)request, request + sizeof(struct fuse_in_header), data);
    }
    kill(getpid(), SIGTERM);
    return unused;
}

int main(int argc, char **argv) {
    if (argc != 7) return fputs("slowfs.c: not to be started by hand; use scripts/slowfs\n", stderr), 2;
    source = open(argv[2], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    device = atoi(argv[1]), latency_ns = strtoull(argv[4], NULL, 10), bandwidth = strtoull(argv[5], NULL, 10);
    writable = atoi(argv[6]);
    umask(0);                                               /* the kernel has applied the writer's */
    sigset_t all, end;
    sigfillset(&all), sigemptyset(&end), sigaddset(&end, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &all, NULL);                 /* Ctrl-C is for scripts/slowfs, which unmounts first */
    pid_t parent = getppid();
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    prctl(PR_SET_TIMERSLACK, 1000);                         /* sleeps end within 1 µs, not 50 */
    start_thread(work);
    while (num_threads && sigwaitinfo(&end, NULL) < 0) continue;
    if (getppid() != parent) umount2(argv[3], MNT_DETACH | UMOUNT_NOFOLLOW);  /* it was killed, so nobody else will */
    write_stats(STDOUT_FILENO);
    return 0;
}

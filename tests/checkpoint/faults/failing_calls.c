/* Fails one call that opens or changes a file: a library to preload.

   Calls are counted that concern a path below `prefix`. The call with the number `fail_at` fails:
   the process is killed, or the call returns an error without an effect. A write that is killed has
   written half of its bytes. With `from_there_on`, all later calls of that class fail, too. An error
   of class 'r' has an effect: as over a network, where only the answer is lost.

   A call is of one or more classes. 'o' opens a file, 'g' needs room on the disk, 'c' changes
   something, 'r' renames or removes. Every process of the test is forked from one that has preloaded this library. */

#define _GNU_SOURCE
#undef _FORTIFY_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char prefix[PATH_MAX];
static int fail_at, error, from_there_on, num_calls, has_failed;
static char class_of_failure;
static char calls[1 << 18];
static size_t calls_end;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

/* Starts to count. `wanted_error` 0 kills the process; `at` 0 fails nothing. */
void faults_start(const char *path, int at, int wanted_error, int is_from_there_on, char class) {
    fail_at = at, error = wanted_error, from_there_on = is_from_there_on, class_of_failure = class;
    num_calls = has_failed = 0;
    calls_end = 0, calls[0] = 0;
    strncpy(prefix, path, sizeof prefix - 1);
}

/* Stops; returns whether a call has failed. */
int faults_stop(void) {
    prefix[0] = 0;
    return has_failed;
}

/* The calls so far: a line for each, "classes name path". */
const char *faults_calls(void) { return calls; }

/* Returns whether a path is below the prefix, and makes it absolute. */
static int is_below(int folder, const char *path, char *full) {
    if (!prefix[0]) return 0;
    full[0] = 0;
    if (!path || path[0] != '/') {
        if (folder == AT_FDCWD) {
            if (!getcwd(full, PATH_MAX)) return 0;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            const ssize_t count = readlink(link, full, PATH_MAX - 1);
            if (count <= 0) return 0;
            full[count] = 0;
        }
        if (path) strncat(full, "/", PATH_MAX - strlen(full) - 1);
    }
    if (path) strncat(full, path, PATH_MAX - strlen(full) - 1);
    return strncmp(full, prefix, strlen(prefix)) == 0;
}

/* Counts a call; returns the error that it shall have, 0: none, -1: the process is to be killed. */
static int counted(const char *classes, const char *name, int folder, const char *path) {
    char full[PATH_MAX];
    const int before = errno;
    if (!is_below(folder, path, full)) {
        errno = before;
        return 0;
    }
    pthread_mutex_lock(&mutex);
    const size_t left = sizeof calls - calls_end;
    const int count = snprintf(calls + calls_end, left, "%s %s %s\n", classes, name, full);
    if (count > 0 && (size_t)count < left) calls_end += (size_t)count;
    ++num_calls;
    int result = 0;
    const int again = from_there_on && has_failed && strchr(classes, class_of_failure);
    if (num_calls == fail_at || again) {
        has_failed = 1;
        result = error ? error : -1;
    }
    pthread_mutex_unlock(&mutex);
    errno = before;
    return result;
}

static void die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define FAIL(result, classes, name, folder, path)                       \
    do {                                                                \
        const int wrong = counted(classes, name, folder, path);         \
        if (wrong < 0) die();                                           \
        if (wrong) { errno = wrong; return result; }                    \
    } while (0)

/* As FAIL, for a call that may have had its effect. */
#define FAIL_AFTER(call, classes, name, folder, path)                   \
    do {                                                                \
        const int wrong = counted(classes, name, folder, path);         \
        if (wrong < 0) die();                                           \
        if (wrong && class_of_failure == 'r' && call < 0) return -1;    \
        if (wrong) { errno = wrong; return -1; }                        \
    } while (0)

#define MODE() mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { \
    va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }

static const char *classes_of(int flags) {
    if (flags & O_CREAT) return "ogc";
    return flags & O_TRUNC ? "oc" : "o";
}

#define OPEN(name) int name(const char *path, int flags, ...) { \
    REAL(name); MODE(); FAIL(-1, classes_of(flags), "open", AT_FDCWD, path); \
    return real(path, flags, mode); }
OPEN(open)
OPEN(open64)

#define OPENAT(name) int name(int folder, const char *path, int flags, ...) { \
    REAL(name); MODE(); FAIL(-1, classes_of(flags), "open", folder, path); \
    return real(folder, path, flags, mode); }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name) FILE *name(const char *path, const char *how) { \
    REAL(name); FAIL(NULL, *how == 'r' ? "o" : "ogc", "fopen", AT_FDCWD, path); \
    return real(path, how); }
FOPEN(fopen)
FOPEN(fopen64)

DIR *opendir(const char *path) {
    REAL(opendir);
    FAIL(NULL, "o", "opendir", AT_FDCWD, path);
    return real(path);
}

/* Writes: one that is killed has written half. */
#define FAIL_WRITE(name, half)                                          \
    do {                                                                \
        const int wrong = counted("gc", name, fd, NULL);                \
        if (wrong < 0) { half; die(); }                                 \
        if (wrong) { errno = wrong; return -1; }                        \
    } while (0)

ssize_t write(int fd, const void *data, size_t count) {
    REAL(write);
    FAIL_WRITE("write", (void)!real(fd, data, count / 2));
    return real(fd, data, count);
}

#define PWRITE(name) ssize_t name(int fd, const void *data, size_t count, off_t at) { \
    REAL(name); FAIL_WRITE("pwrite", (void)!real(fd, data, count / 2, at)); \
    return real(fd, data, count, at); }
PWRITE(pwrite)
PWRITE(pwrite64)

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    FAIL_WRITE("writev", (void)!real(fd, parts, count / 2));
    return real(fd, parts, count);
}

#define PWRITEV(name) ssize_t name(int fd, const struct iovec *parts, int count, off_t at) { \
    REAL(name); FAIL_WRITE("pwritev", (void)!real(fd, parts, count / 2, at)); \
    return real(fd, parts, count, at); }
PWRITEV(pwritev)
PWRITEV(pwritev64)

#define FTRUNCATE(name) int name(int fd, off_t size) { \
    REAL(name); FAIL(-1, "gc", "ftruncate", fd, NULL); return real(fd, size); }
FTRUNCATE(ftruncate)
FTRUNCATE(ftruncate64)

#define FALLOCATE(name) int name(int fd, int mode, off_t at, off_t count) { \
    REAL(name); FAIL(-1, "gc", "fallocate", fd, NULL); return real(fd, mode, at, count); }
FALLOCATE(fallocate)
FALLOCATE(fallocate64)

#define POSIX_FALLOCATE(name) int name(int fd, off_t at, off_t count) { \
    REAL(name); \
    const int wrong = counted("gc", "posix_fallocate", fd, NULL); \
    if (wrong < 0) die(); \
    return wrong ? wrong : real(fd, at, count); }
POSIX_FALLOCATE(posix_fallocate)
POSIX_FALLOCATE(posix_fallocate64)

#define FLUSH(name) int name(int fd) { \
    REAL(name); FAIL(-1, "gc", #name, fd, NULL); return real(fd); }
FLUSH(fsync)
FLUSH(fdatasync)
FLUSH(syncfs)

int rename(const char *from, const char *to) {
    REAL(rename);
    FAIL_AFTER(real(from, to), "gcr", "rename", AT_FDCWD, to);
    return real(from, to);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    REAL(renameat);
    FAIL_AFTER(real(from_folder, from, to_folder, to), "gcr", "rename", to_folder, to);
    return real(from_folder, from, to_folder, to);
}

int unlink(const char *path) {
    REAL(unlink);
    FAIL_AFTER(real(path), "cr", "unlink", AT_FDCWD, path);
    return real(path);
}

int unlinkat(int folder, const char *path, int flags) {
    REAL(unlinkat);
    FAIL_AFTER(real(folder, path, flags), "cr", "unlink", folder, path);
    return real(folder, path, flags);
}

int rmdir(const char *path) {
    REAL(rmdir);
    FAIL_AFTER(real(path), "cr", "rmdir", AT_FDCWD, path);
    return real(path);
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    FAIL(-1, "gc", "mkdir", AT_FDCWD, path);
    return real(path, mode);
}

int mkdirat(int folder, const char *path, mode_t mode) {
    REAL(mkdirat);
    FAIL(-1, "gc", "mkdir", folder, path);
    return real(folder, path, mode);
}

int link(const char *from, const char *to) {
    REAL(link);
    FAIL(-1, "gc", "link", AT_FDCWD, to);
    return real(from, to);
}

int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    REAL(linkat);
    FAIL(-1, "gc", "link", to_folder, to);
    return real(from_folder, from, to_folder, to, flags);
}

int symlink(const char *target, const char *path) {
    REAL(symlink);
    FAIL(-1, "gc", "symlink", AT_FDCWD, path);
    return real(target, path);
}

int chmod(const char *path, mode_t mode) {
    REAL(chmod);
    FAIL(-1, "c", "chmod", AT_FDCWD, path);
    return real(path, mode);
}

int utimensat(int folder, const char *path, const struct timespec times[2], int flags) {
    REAL(utimensat);
    FAIL(-1, "c", "utime", folder, path);
    return real(folder, path, times, flags);
}

int futimens(int fd, const struct timespec times[2]) {
    REAL(futimens);
    FAIL(-1, "c", "utime", fd, NULL);
    return real(fd, times);
}

ssize_t sendfile(int to, int from, off_t *at, size_t count) {
    REAL(sendfile);
    FAIL(-1, "gc", "sendfile", to, NULL);
    return real(to, from, at, count);
}

ssize_t copy_file_range(int from, off_t *from_at, int to, off_t *to_at, size_t count, unsigned flags) {
    REAL(copy_file_range);
    FAIL(-1, "gc", "copy_file_range", to, NULL);
    return real(from, from_at, to, to_at, count, flags);
}

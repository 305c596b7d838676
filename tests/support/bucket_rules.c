/* Preloaded into a process, gives the directory tree $BUCKET_ROOT the rules of a mounted bucket: no
   renamed directories, no files opened for appending, no hard links. Each refusal is a line in the
   file $BUCKET_REFUSALS. Paths are compared as given, so $BUCKET_ROOT must not contain links. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

static int in_bucket(int directory, const char *path) {
  const char *root = getenv("BUCKET_ROOT");
  char whole[2 * PATH_MAX + 2], link[64];
  if (root == NULL || path == NULL) return 0;
  if (path[0] == '/') {
    snprintf(whole, sizeof whole, "%s", path);
  } else {
    char base[PATH_MAX] = "";
    if (directory == AT_FDCWD) {
      if (getcwd(base, sizeof base) == NULL) return 0;
    } else {
      snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
      ssize_t length = readlink(link, base, sizeof base - 1);
      if (length < 0) return 0;
      base[length] = 0;
    }
    snprintf(whole, sizeof whole, "%s/%s", base, path);
  }
  size_t length = strlen(root);
  return strncmp(whole, root, length) == 0 && (whole[length] == '/' || whole[length] == 0);
}

static int refuse(const char *what, const char *path) {
  const char *log = getenv("BUCKET_REFUSALS");
  if (log != NULL) {
    int file = REAL(open)(log, O_WRONLY | O_CREAT | O_APPEND, 0666);
    dprintf(file, "%s %s\n", what, path);
    close(file);
  }
  errno = ENOTSUP;
  return -1;
}

static int renames_directory(int directory, const char *path) {
  struct stat found;
  return in_bucket(directory, path) &&
         fstatat(directory, path, &found, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(found.st_mode);
}

int rename(const char *from, const char *to) {
  if (renames_directory(AT_FDCWD, from)) return refuse("rename", from);
  return REAL(rename)(from, to);
}

int renameat(int a, const char *from, int b, const char *to) {
  if (renames_directory(a, from)) return refuse("rename", from);
  return REAL(renameat)(a, from, b, to);
}

int renameat2(int a, const char *from, int b, const char *to, unsigned int flags) {
  if (renames_directory(a, from)) return refuse("rename", from);
  return REAL(renameat2)(a, from, b, to, flags);
}

int link(const char *from, const char *to) {
  if (in_bucket(AT_FDCWD, to)) return refuse("link", to);
  return REAL(link)(from, to);
}

int linkat(int a, const char *from, int b, const char *to, int flags) {
  if (in_bucket(b, to)) return refuse("link", to);
  return REAL(linkat)(a, from, b, to, flags);
}

#define OPENS(name)                                                                    \
  int name(const char *path, int flags, ...) {                                         \
    va_list rest;                                                                      \
    va_start(rest, flags);                                                             \
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;          \
    va_end(rest);                                                                      \
    if ((flags & O_APPEND) && in_bucket(AT_FDCWD, path)) return refuse("append", path); \
    return REAL(name)(path, flags, mode);                                              \
  }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                                                  \
  int name(int directory, const char *path, int flags, ...) {                           \
    va_list rest;                                                                       \
    va_start(rest, flags);                                                              \
    mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(rest, mode_t) : 0;           \
    va_end(rest);                                                                       \
    if ((flags & O_APPEND) && in_bucket(directory, path)) return refuse("append", path); \
    return REAL(name)(directory, path, flags, mode);                                    \
  }
OPENS_AT(openat)
OPENS_AT(openat64)

#define OPENS_STREAM(name)                                            \
  FILE *name(const char *path, const char *mode) {                    \
    if (mode[0] == 'a' && in_bucket(AT_FDCWD, path)) {                \
      refuse("append", path);                                         \
      return NULL;                                                    \
    }                                                                 \
    return REAL(name)(path, mode);                                    \
  }
OPENS_STREAM(fopen)
OPENS_STREAM(fopen64)

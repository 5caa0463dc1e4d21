"""Faults of a disk: a library that fails, or kills, at the n-th change below one folder.

It is preloaded (`LD_PRELOAD`), and stands before the functions of libc that change files. Changes
are counted from 1 for each `arm`. Rules:

1. Only changes below the folder count. Nothing else is looked at, and reading never fails.
2. An error comes once, or also at all later changes (a disk that is full, or gone).
3. Room that runs out for good does so in the midst of a write: the first half is written. It never
   runs out for changes that need none.
4. A torn write is half a write, then SIGKILL; for all other changes SIGKILL comes right after them.
5. `fsync` only counts: SIGKILL loses nothing that a disk has not yet.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Kind = Literal["full", "full once", "broken", "broken once", "kill", "torn"]
KINDS: Final[tuple[Kind, ...]] = ("full", "full once", "broken", "broken once", "kill", "torn")
"""Ways to fail: ENOSPC from then on, ENOSPC once, EIO from then on, EIO once, SIGKILL before the
change, half of the change and SIGKILL.
"""
DEADLY: Final = ("kill", "torn")

SOURCE: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, FULL, FULL_ONCE, BROKEN, BROKEN_ONCE, KILL, TORN };
enum { GO_ON, FAIL, HALF, LAST };

static char folder[PATH_MAX];
static size_t length;
static int how;
static atomic_long count, target;

void faults_arm(const char *below, long at, int kind)
{
    snprintf(folder, sizeof folder, "%s", below);
    length = strlen(folder);
    how = kind;
    atomic_store(&target, at);
    atomic_store(&count, 0);
}

long faults_count(void) { return atomic_load(&count); }

static int is_below(const char *path)
{
    return length && strncmp(path, folder, length) == 0 && (path[length] == '/' || !path[length]);
}

static int of_descriptor(int descriptor, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    path[size < 0 ? 0 : size] = 0;
    return size > 0;
}

static int of_name(int at, const char *name, char *path)
{
    char start[PATH_MAX];
    if (name[0] == '/')
        return snprintf(path, PATH_MAX, "%s", name) > 0;
    if (at == AT_FDCWD ? !getcwd(start, sizeof start) : !of_descriptor(at, start))
        return 0;
    return snprintf(path, PATH_MAX, "%s/%s", start, name) > 0;
}

static void die(void)
{
    kill(getpid(), SIGKILL);
    for (;;)
        pause();
}

/* What is to become of a change of `path`; `grows` if it may need room, `bytes` of a write. */
static int decide(const char *path, int grows, size_t bytes)
{
    int old = errno;
    if (!is_below(path))
        return GO_ON;
    long number = atomic_fetch_add(&count, 1) + 1, at = atomic_load(&target);
    int first = number == at, lasting = how == FULL || how == BROKEN;
    errno = old;
    if (!at || number < at || (number > at && !lasting))
        return GO_ON;
    switch (how) {
    case KILL:
        die();
    case TORN:
        return bytes > 1 ? HALF : LAST;
    case FULL:
    case FULL_ONCE:
        if (!grows)
            return GO_ON;
        if (how == FULL && first && bytes > 1)
            return HALF;
        errno = ENOSPC;
        return FAIL;
    default:
        errno = EIO;
        return FAIL;
    }
}

#define NEXT(name) \
    static __typeof__(name) *next; \
    if (!next) next = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

/* One half is written: the caller learns how much, if it lives on. */
#define WRITE(call, half, descriptor, bytes) \
    char path[PATH_MAX]; \
    if (!length || !of_descriptor(descriptor, path)) return call; \
    int fate = decide(path, 1, bytes); \
    if (fate == FAIL) return -1; \
    if (fate == HALF) { ssize_t done = half; if (how == TORN) die(); return done; } \
    ssize_t done = call; \
    if (fate == LAST) die(); \
    return done;

#define CHANGE(call, found, grows) \
    char path[PATH_MAX]; \
    if (!length || !(found)) return call; \
    int fate = decide(path, grows, 0); \
    if (fate == FAIL) return -1; \
    int done = call; \
    if (fate == LAST) die(); \
    return done;

ssize_t write(int fd, const void *data, size_t size)
{
    NEXT(write);
    WRITE(next(fd, data, size), next(fd, data, size / 2), fd, size)
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at)
{
    NEXT(pwrite);
    WRITE(next(fd, data, size, at), next(fd, data, size / 2, at), fd, size)
}
ssize_t writev(int fd, const struct iovec *parts, int number)
{
    NEXT(writev);
    WRITE(next(fd, parts, number), next(fd, parts, number > 1 ? number / 2 : 1), fd, (size_t)number)
}

/* A sync is counted, and may fail, and takes no time. */
static int sync_of(int fd, int (*next)(int))
{
    char path[PATH_MAX];
    if (!length || !of_descriptor(fd, path) || !is_below(path)) return next(fd);
    int fate = decide(path, 1, 0);
    if (fate == LAST) die();
    return fate == FAIL ? -1 : 0;
}
int fsync(int fd) { NEXT(fsync); return sync_of(fd, next); }
int fdatasync(int fd) { NEXT(fdatasync); return sync_of(fd, next); }

int ftruncate(int fd, off_t size)
{
    NEXT(ftruncate);
    CHANGE(next(fd, size), of_descriptor(fd, path), 0)
}
int renameat2(int at, const char *from, int there, const char *to, unsigned flags)
{
    NEXT(renameat2);
    CHANGE(next(at, from, there, to, flags), of_name(there, to, path), 0)
}
int renameat(int at, const char *from, int there, const char *to)
{
    return renameat2(at, from, there, to, 0);
}
int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }
int unlinkat(int at, const char *name, int flags)
{
    NEXT(unlinkat);
    CHANGE(next(at, name, flags), of_name(at, name, path), 0)
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
int mkdir(const char *name, mode_t rights)
{
    NEXT(mkdir);
    CHANGE(next(name, rights), of_name(AT_FDCWD, name, path), 1)
}

/* Only the making of a file is a change. */
static int makes(const char *path, int flags)
{
    return (flags & O_CREAT) && access(path, F_OK) != 0;
}
#define OPEN(call, at) \
    mode_t rights = 0; \
    if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) { \
        va_list more; \
        va_start(more, flags); \
        rights = va_arg(more, mode_t); \
        va_end(more); \
    } \
    CHANGE(call, of_name(at, name, path) && makes(path, flags), 1)

int open(const char *name, int flags, ...)
{
    NEXT(open);
    OPEN(next(name, flags, rights), AT_FDCWD)
}
int openat(int at, const char *name, int flags, ...)
{
    NEXT(openat);
    OPEN(next(at, name, flags, rights), at)
}

/* Offsets have 64 bits in any case. */
#define ALSO(name, other) extern __typeof__(name) other __attribute__((alias(#name)))
ALSO(pwrite, pwrite64);
ALSO(ftruncate, ftruncate64);
ALSO(open, open64);
ALSO(openat, openat64);
"""


@dataclass(frozen=True)
class Fault:
    below: str
    """Folder, its real path."""
    at: int
    """Number of the change that fails, from 1; 0: none does."""
    kind: Kind


def build(folder: Path) -> Path | None:
    """Compile the library into `folder`; None without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    source, library = folder / "faults.c", folder / "faults.so"
    source.write_text(SOURCE)
    flags = ["-O1", "-fPIC", "-shared", "-w", "-U_FORTIFY_SOURCE"]
    subprocess.run([compiler, *flags, "-o", library, source, "-ldl"], check=True)
    return library


def arm(fault: Fault) -> None:
    """Have this process, in which the library is preloaded, fail as `fault` says."""
    library = ctypes.CDLL(None)
    library.faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
    library.faults_arm(fault.below.encode(), fault.at, KINDS.index(fault.kind) + 1)


def changes() -> int:
    count = ctypes.CDLL(None).faults_count
    count.restype = ctypes.c_long
    number: int = count()
    return number

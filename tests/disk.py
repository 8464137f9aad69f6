"""A file system that fails: a library before libc's calls, in a child process, for the files of one folder.

`Disk` compiles it (a test is skipped where there is no C compiler). In the child `fault.set` says what goes
wrong from now on; the parent reads, with a sound file system, what was left.
`small` is one in memory that fills, where mounting is allowed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

import eventlog

FAULTS: Final = {
    "none": "0",
    "EIO": "E",  # every write fails
    "ENOSPC": "N",
    "EDQUOT": "Q",
    "cut": "P",  # every second write writes half and says so, the one after it fails: a disk that is full
    "short": "S",  # every write writes at most half
    "open": "O",  # no file can be created
    "sync": "F",  # nothing can be synced
    "close": "C",  # closing fails, as on NFS over quota
    "hang": "H",  # every write hangs
    "hang open": "W",  # every creation hangs
    "until freed": "R",  # every write fails until a file without a name is closed: then its size fits
}

SOURCE: Final = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static volatile char *mode(void) {
    static char *at;
    if (!at) {
        int fd = (int)syscall(SYS_openat, AT_FDCWD, getenv("FAULTY_MODE"), O_RDONLY, 0);
        at = fd < 0 ? "0" : mmap(0, 1, PROT_READ, MAP_SHARED, fd, 0);
    }
    return at;
}
static int below(const char *path) {
    const char *root = getenv("FAULTY_ROOT");
    return root && !strncmp(path, root, strlen(root));
}
static int ours(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return below(path);
}
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define FAIL(code) do { errno = code; return -1; } while (0)

static long room;
ssize_t write(int fd, const void *data, size_t n) {
    static int turn;
    if (ours(fd)) switch (*mode()) {
        case 'E': FAIL(EIO);
        case 'N': FAIL(ENOSPC);
        case 'R': if (room < (long)n) FAIL(ENOSPC); room -= n; break;
        case 'Q': FAIL(EDQUOT);
        case 'P': if (turn ^= 1) { n = n / 2 ? n / 2 : 1; break; } FAIL(ENOSPC);
        case 'S': n = n / 2 ? n / 2 : 1; break;
        case 'H': for (;;) pause();
    }
    return REAL(write)(fd, data, n);
}
static int refused(const char *path, int flags) {
    if (!(flags & O_CREAT) || !below(path)) return 0;
    if (*mode() == 'W') for (;;) pause();
    return *mode() == 'O';
}
#define OPEN(name) int name(const char *path, int flags, ...) { \
    va_list more; va_start(more, flags); int rights = va_arg(more, int); va_end(more); \
    if (refused(path, flags)) FAIL(ENOSPC); \
    return REAL(name)(path, flags, rights); }
OPEN(open)
OPEN(open64)
int fsync(int fd) { if (*mode() == 'F' && ours(fd)) FAIL(EIO); return REAL(fsync)(fd); }
int fdatasync(int fd) { if (*mode() == 'F' && ours(fd)) FAIL(EIO); return REAL(fdatasync)(fd); }
int close(int fd) {
    struct stat of;
    int own = ours(fd), bad = *mode() == 'C' && own;
    if (own && !fstat(fd, &of) && !of.st_nlink) room += of.st_size;
    REAL(close)(fd);
    if (bad) FAIL(EDQUOT);
    return 0;
}
"""

PRELUDE: Final = """
import mmap, os, sys
class fault:
    _file = open(os.environ["FAULTY_MODE"], "r+b")
    _at = mmap.mmap(_file.fileno(), 1)
    @classmethod
    def set(cls, letter):
        cls._at[0:1] = letter.encode()
root = os.environ["FAULTY_ROOT"]
"""


class Disk:
    """A folder whose file system fails in child processes."""

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None or not sys.platform.startswith("linux"):
            pytest.skip("no C compiler here")
        self.root = folder / "disk"
        self.root.mkdir()
        self._mode, self._library = folder / "mode", folder / "faulty.so"
        self._mode.write_bytes(b"0")
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-w", "-o", self._library, "-x", "c", "-", "-ldl"],
            input=SOURCE.encode(),
            check=True,
        )

    def run(self, code: str, *, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run code that sees `root` and `fault`; AssertionError with its stderr when it fails."""
        done = subprocess.run(
            [sys.executable, "-W", "error::UserWarning", "-c", PRELUDE + textwrap.dedent(code)],
            env={
                **os.environ,
                "LD_PRELOAD": str(self._library),
                "FAULTY_ROOT": str(self.root),
                "FAULTY_MODE": str(self._mode),
            },
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done


@contextmanager
def small(path: Path, options: str = "size=1m"):
    """Yield a file system of its own in memory; the test is skipped where none may be mounted."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield path
    finally:
        eventlog.stop()
        subprocess.run(["umount", "-l", path], check=True)  # what a failed test left open holds it no more

"""Linux primitives through ctypes: capabilities, Landlock, namespaces, a minimal file tree. No dependency, no
privilege assumed.
"""

from __future__ import annotations

import ctypes
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 8, 24, 38
CAP_DAC_READ_SEARCH, CAP_SYS_ADMIN = 2, 21

CLONE = {
    "mount": 0x00020000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 1024, 2048, 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2

# Landlock: the access rights each ABI knows (linux/landlock.h)
_FS_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
READ_FILE, READ_DIR = 1 << 2, 1 << 3
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same number on every architecture
_NOBODY = 65534


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def prctl(option: int, value: int) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def unshare(*names: str) -> None:
    flags = 0
    for name in names:
        flags |= CLONE[name]
    _check(_libc.unshare(flags), "unshare " + "+".join(names))


def setns(fd: int, name: str) -> None:
    _check(_libc.setns(fd, CLONE[name]), f"setns {name}")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    encoded = None if data is None else data.encode()
    _check(_libc.mount(*arguments, ctypes.c_ulong(flags), encoded), f"mount {target}")


def effective_capabilities() -> int:
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return int(line.split()[1], 16)
    return 0


def enter_namespaces() -> None:
    """Leave the host's mounts, network, IPC, names and process table; the next child is the first process of its
    own table.

    With CAP_SYS_ADMIN no user namespace is needed, so this also works where those are switched off. Raises OSError.
    """
    names = ("mount", "net", "ipc", "uts", "pid")
    if effective_capabilities() >> CAP_SYS_ADMIN & 1:
        unshare(*names)
    else:
        user, group = os.getuid(), os.getgid()
        unshare("user", *names)
        for path, text in (
            ("/proc/self/setgroups", "deny"),
            ("/proc/self/uid_map", f"{_NOBODY} {user} 1"),
            ("/proc/self/gid_map", f"{_NOBODY} {group} 1"),
        ):
            with open(path, "w", encoding="ascii") as file:
                file.write(text)
    mount(None, "/", None, MS_REC | MS_PRIVATE)


_LOCKED = (
    (os.ST_NOEXEC, MS_NOEXEC),
    (os.ST_NOATIME, MS_NOATIME),
    (os.ST_NODIRATIME, MS_NODIRATIME),
    (os.ST_RELATIME, MS_RELATIME),
)


def _bind_read_only(source: str, target: str) -> None:
    mount(source, target, None, MS_BIND | MS_REC)
    flags = os.statvfs(target).f_flag  # a user namespace may not clear the flags that the mount came with
    kept = sum(ours for theirs, ours in _LOCKED if flags & theirs)
    mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | kept)


def enter_tree(visible: list[str], hidden: list[str], packages: list[str]) -> None:
    """Make an empty, read-only file tree the root: ``visible`` at their own paths, nothing at ``hidden`` but
    ``packages``.

    Call after `enter_namespaces`. Raises OSError.
    """
    anchor = "/sys" if os.path.isdir("/sys") else "/proc"
    flags = MS_NOSUID | MS_NODEV
    mount("tmpfs", anchor, "tmpfs", flags, "mode=0755,size=64k")
    for path in visible:
        _show(path, anchor)
    for path in hidden:
        mount("tmpfs", anchor + path, "tmpfs", flags, "mode=0755,size=64k")
    for path in packages:
        _show(path, anchor)
    for place in (*(anchor + path for path in hidden), anchor):
        mount(None, place, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)
    os.chdir(anchor)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def _show(path: str, anchor: str) -> None:
    target = anchor + path
    if os.path.isdir(path):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _bind_read_only(path, target)


_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}


def set_capabilities(mask: int) -> None:
    """Keep only ``mask`` as permitted and effective; inheritable and ambient become empty."""
    header = struct.pack("=Ii", 0x20080522, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = struct.pack("=6I", low, low, 0, high, high, 0)
    result = _libc.syscall(_CAPSET[os.uname().machine], ctypes.c_char_p(header), ctypes.c_char_p(data))
    _check(result, "capset")


def become_nobody(keep: int = 0) -> None:
    """Give up the user, the groups and every capability but ``keep`` (a mask)."""
    if os.geteuid() == 0:
        if keep:
            prctl(PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    set_capabilities(keep)


def drop_bounding_set() -> None:
    """No exec of ours or our children's will ever bring a capability back; what we hold, we keep."""
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # past the last one, or not ours to drop


def landlock_abi() -> int:
    """The kernel's Landlock version, 0 when it has none or it is switched off."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def landlock_ruleset(readable: list[str], listable: list[str]) -> int:
    """A ruleset fd under which only ``readable`` can be read and ``listable`` listed, and nothing written or
    connected to.
    """
    abi = landlock_abi()
    if abi == 0:
        raise OSError("this kernel has no Landlock")
    handled = _FS_RIGHTS[min(abi, 5)]
    attributes = struct.pack("=QQQ", handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = _check(_libc.syscall(_CREATE_RULESET, ctypes.c_char_p(attributes), ctypes.c_size_t(size), 0), "Landlock")
    for paths, rights in ((readable, READ_FILE | READ_DIR), (listable, READ_DIR)):
        for path in paths:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = rights if os.path.isdir(path) else rights & ~READ_DIR
            rule = struct.pack("=Qi", allowed, fd)
            _check(_libc.syscall(_ADD_RULE, ruleset, 1, ctypes.c_char_p(rule), 0), f"Landlock rule for {path}")
            os.close(fd)
    return ruleset


def landlock_enforce(ruleset: int) -> None:
    _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "Landlock")

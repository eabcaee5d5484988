"""System call numbers, per architecture.

Taken from the kernel's tables (`arch/x86/entry/syscalls/syscall_64.tbl`, `include/uapi/asm-generic/unistd.h`). A
call that is missing from an architecture's table does not exist there. Only what the filter and its report name is
listed.
"""

from __future__ import annotations

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# fmt: off
NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8,
        "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14,
        "rt_sigreturn": 15, "ioctl": 16, "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21,
        "pipe": 22, "select": 23, "sched_yield": 24, "mremap": 25, "madvise": 28, "shmget": 29, "shmat": 30,
        "dup": 32, "dup2": 33, "pause": 34, "nanosleep": 35, "getitimer": 36, "alarm": 37, "setitimer": 38,
        "getpid": 39, "socket": 41, "connect": 42, "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47,
        "bind": 49, "socketpair": 53, "clone": 56, "fork": 57, "vfork": 58, "execve": 59, "exit": 60, "wait4":
        61, "kill": 62, "uname": 63, "semget": 64, "msgget": 68, "fcntl": 72, "truncate": 76, "ftruncate": 77,
        "getcwd": 79, "chdir": 80, "fchdir": 81, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link":
        86, "unlink": 87, "symlink": 88, "readlink": 89, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93,
        "umask": 95, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99, "times": 100,
        "ptrace": 101, "getuid": 102, "syslog": 103, "getgid": 104, "setuid": 105, "setgid": 106, "geteuid":
        107, "getegid": 108, "setpgid": 109, "getppid": 110, "getpgrp": 111, "setsid": 112, "getgroups": 115,
        "setresuid": 117, "getresuid": 118, "setresgid": 119, "getresgid": 120, "getpgid": 121, "getsid": 124,
        "capset": 126, "rt_sigpending": 127, "rt_sigtimedwait": 128, "rt_sigqueueinfo": 129, "rt_sigsuspend":
        130, "sigaltstack": 131, "personality": 135, "statfs": 137, "fstatfs": 138, "setpriority": 141,
        "sched_setscheduler": 144, "mlock": 149, "mlockall": 151, "pivot_root": 155, "prctl": 157, "arch_prctl":
        158, "setrlimit": 160, "chroot": 161, "mount": 165, "umount2": 166, "gettid": 186, "tkill": 200, "time":
        201, "futex": 202, "sched_setaffinity": 203, "sched_getaffinity": 204, "getdents64": 217,
        "set_tid_address": 218, "restart_syscall": 219, "timer_create": 222, "clock_gettime": 228,
        "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "tgkill": 234, "mq_open": 240, "waitid":
        247, "add_key": 248, "keyctl": 250, "openat": 257, "mkdirat": 258, "fchownat": 260, "newfstatat": 262,
        "unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266, "readlinkat": 267, "fchmodat": 268,
        "faccessat": 269, "pselect6": 270, "ppoll": 271, "unshare": 272, "set_robust_list": 273, "utimensat":
        280, "fallocate": 285, "signalfd4": 289, "eventfd2": 290, "epoll_create1": 291, "dup3": 292, "pipe2":
        293, "inotify_init1": 294, "rt_tgsigqueueinfo": 297, "perf_event_open": 298, "prlimit64": 302,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "setns": 308, "getcpu": 309, "process_vm_readv":
        310, "process_vm_writev": 311, "kcmp": 312, "sched_setattr": 314, "renameat2": 316, "seccomp": 317,
        "getrandom": 318, "memfd_create": 319, "bpf": 321, "execveat": 322, "userfaultfd": 323, "membarrier":
        324, "mlock2": 325, "statx": 332, "rseq": 334, "pidfd_send_signal": 424, "io_uring_setup": 425,
        "io_uring_enter": 426, "pidfd_open": 434, "clone3": 435, "openat2": 437, "pidfd_getfd": 438,
        "faccessat2": 439, "process_madvise": 440, "landlock_create_ruleset": 444, "landlock_add_rule": 445,
        "landlock_restrict_self": 446,
    },
    "aarch64": {
        "getcwd": 17, "eventfd2": 19, "epoll_create1": 20, "dup": 23, "dup3": 24, "fcntl": 25, "inotify_init1":
        26, "ioctl": 29, "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "linkat": 37, "renameat": 38,
        "umount2": 39, "mount": 40, "pivot_root": 41, "statfs": 43, "fstatfs": 44, "truncate": 45, "ftruncate":
        46, "fallocate": 47, "faccessat": 48, "chdir": 49, "fchdir": 50, "chroot": 51, "fchmod": 52, "fchmodat":
        53, "fchownat": 54, "fchown": 55, "openat": 56, "close": 57, "pipe2": 59, "getdents64": 61, "lseek": 62,
        "read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67, "pwrite64": 68, "pselect6": 72,
        "ppoll": 73, "signalfd4": 74, "readlinkat": 78, "newfstatat": 79, "fstat": 80, "utimensat": 88,
        "capset": 91, "personality": 92, "exit": 93, "exit_group": 94, "waitid": 95, "set_tid_address": 96,
        "unshare": 97, "futex": 98, "set_robust_list": 99, "nanosleep": 101, "getitimer": 102, "setitimer": 103,
        "timer_create": 107, "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115, "syslog": 116,
        "ptrace": 117, "sched_setscheduler": 119, "sched_setaffinity": 122, "sched_getaffinity": 123,
        "sched_yield": 124, "restart_syscall": 128, "kill": 129, "tkill": 130, "tgkill": 131, "sigaltstack":
        132, "rt_sigsuspend": 133, "rt_sigaction": 134, "rt_sigprocmask": 135, "rt_sigpending": 136,
        "rt_sigtimedwait": 137, "rt_sigqueueinfo": 138, "rt_sigreturn": 139, "setpriority": 140, "setgid": 144,
        "setuid": 146, "setresuid": 147, "getresuid": 148, "setresgid": 149, "getresgid": 150, "times": 153,
        "setpgid": 154, "getpgid": 155, "getsid": 156, "setsid": 157, "getgroups": 158, "uname": 160,
        "getrlimit": 163, "setrlimit": 164, "getrusage": 165, "umask": 166, "prctl": 167, "getcpu": 168,
        "gettimeofday": 169, "getpid": 172, "getppid": 173, "getuid": 174, "geteuid": 175, "getgid": 176,
        "getegid": 177, "gettid": 178, "sysinfo": 179, "mq_open": 180, "msgget": 186, "semget": 190, "shmget":
        194, "shmat": 196, "socket": 198, "socketpair": 199, "bind": 200, "connect": 203, "sendto": 206,
        "recvfrom": 207, "sendmsg": 211, "recvmsg": 212, "brk": 214, "munmap": 215, "mremap": 216, "add_key":
        217, "keyctl": 219, "clone": 220, "execve": 221, "mmap": 222, "mprotect": 226, "mlock": 228, "mlockall":
        230, "madvise": 233, "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "wait4": 260, "prlimit64": 261,
        "name_to_handle_at": 264, "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "kcmp": 272, "sched_setattr": 274, "renameat2": 276, "seccomp": 277,
        "getrandom": 278, "memfd_create": 279, "bpf": 280, "execveat": 281, "userfaultfd": 282, "membarrier":
        283, "mlock2": 284, "statx": 291, "rseq": 293, "pidfd_send_signal": 424, "io_uring_setup": 425,
        "io_uring_enter": 426, "pidfd_open": 434, "clone3": 435, "openat2": 437, "pidfd_getfd": 438,
        "faccessat2": 439, "process_madvise": 440, "landlock_create_ruleset": 444, "landlock_add_rule": 445,
        "landlock_restrict_self": 446,
    },
}
# fmt: on


def name_of(number: int, machine: str) -> str:
    """The call's name for reports, or its number as text."""
    for name, value in NUMBERS[machine].items():
        if value == number:
            return name
    return str(number)

#!/usr/bin/env python3
"""Says why a process may not trace its child here, which user-mode Linux lives by; else nothing."""

import ctypes
import os
import signal

TRACEME, PEEKUSER, KILL, SYSEMU = 0, 3, 8, 31


def try_it():
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.restype = ctypes.c_long
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    child = os.fork()
    if child == 0:
        if libc.ptrace(TRACEME, 0, None, None) != 0:
            os._exit(ctypes.get_errno())
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    _, status = os.waitpid(child, os.WUNTRACED)
    if os.WIFEXITED(status):
        return f"PTRACE_TRACEME: {os.strerror(os.WEXITSTATUS(status))}"
    problem = None
    # Runs the child to its next system call without making it.
    if libc.ptrace(SYSEMU, child, None, None) != 0:
        problem = f"PTRACE_SYSEMU: {os.strerror(ctypes.get_errno())}"
    else:
        os.waitpid(child, 0)
    try:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
    return problem


if __name__ == "__main__":
    reason = try_it()
    if reason:
        print(f"a process may not trace its child ({reason}); user-mode Linux needs that. In a "
              "container: --cap-add SYS_PTRACE, or a seccomp profile that allows ptrace")

//! Inspects the processors, the memory and the kernel features that all backends need.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::{fs, io};

use peerlane::host;
use peerlane_toolkit::limits::AvailableMemory;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::process::{Resource, getrlimit};

use super::Finding;
use crate::units::Size;

/// The limit of locked memory from which an RDMA device can register buffers of a useful size.
const LOCKED_BYTES_ENOUGH: u64 = 1 << 30;
/// The number of file descriptors that a group of a few dozen ranks needs, with a reserve.
const DESCRIPTORS_ENOUGH: u64 = 1024;

pub(super) fn inspect() -> Vec<Finding> {
    vec![
        kernel(),
        processors(),
        memory(),
        sealed_memory(),
        abstract_sockets(),
        huge_pages(),
        locked_memory(),
        descriptors(),
    ]
}

fn kernel() -> Finding {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease");
    let release = release.as_deref().map_or("of unknown version", str::trim);
    Finding::ok("kernel", format!("Linux {release}, {}", std::env::consts::ARCH))
}

fn processors() -> Finding {
    let devices = host::discover().unwrap_or_default();
    let Some(device) = devices.first() else {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        return Finding::ok("processors", format!("{cores} cores for this process"));
    };
    let nodes = memory_nodes();
    let nodes =
        if nodes == 1 { "1 memory node".to_owned() } else { format!("{nodes} memory nodes") };
    let (name, cores) = (&device.name, device.cores);
    let plural = if cores == 1 { "" } else { "s" };
    Finding::ok("processors", format!("{name}, {cores} core{plural} for this process, {nodes}"))
}

fn memory_nodes() -> usize {
    let entries = fs::read_dir("/sys/devices/system/node").into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let is_node = |name: &String| {
        name.strip_prefix("node").is_some_and(|number| number.parse::<u32>().is_ok())
    };
    names.filter(is_node).count().max(1)
}

fn memory() -> Finding {
    let devices = host::discover().unwrap_or_default();
    let (Some(device), Ok(available)) = (devices.first(), AvailableMemory::read()) else {
        let advice = "mount /proc, so that runs are checked against the available memory";
        return Finding::warning("memory", "/proc/meminfo cannot be read", advice);
    };
    let total = Size(device.memory_bytes);
    match AvailableMemory::of_control_groups() {
        Some(group) if group == available => Finding::ok(
            "memory",
            format!("{total}, {} available within this control group", Size(group.bytes)),
        ),
        _ => Finding::ok("memory", format!("{total}, {} available", Size(available.bytes))),
    }
}

fn sealed_memory() -> Finding {
    let topic = "sealed memory";
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let sealed = memfd_create("peerlane-doctor", flags)
        .and_then(|file| fcntl_add_seals(&file, SealFlags::GROW | SealFlags::SHRINK));
    match sealed {
        Ok(()) => Finding::ok(topic, "memfd with seals"),
        Err(error) => Finding::missing(
            topic,
            format!("memfd with seals failed: {error}"),
            "the host backend needs memfd_create: allow it in the container's seccomp profile",
        ),
    }
}

fn abstract_sockets() -> Finding {
    let topic = "abstract sockets";
    let name = format!("peerlane-doctor-{}", std::process::id());
    let bound: io::Result<_> =
        SocketAddr::from_abstract_name(name).and_then(|address| UnixListener::bind_addr(&address));
    match bound {
        Ok(_) => Finding::ok(topic, "can be bound"),
        Err(error) => Finding::missing(
            topic,
            format!("cannot be bound: {error}"),
            "the host backend passes memory over abstract Unix sockets: allow them in the \
             container's security profile",
        ),
    }
}

fn huge_pages() -> Finding {
    let topic = "huge pages";
    let path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    let Ok(text) = fs::read_to_string(path) else {
        return Finding::ok(topic, "the kernel has no huge pages for shared memory");
    };
    let chosen = text.split(['[', ']']).nth(1).unwrap_or("unknown").to_owned();
    let found = format!("shared memory: {chosen}");
    match chosen.as_str() {
        "never" | "deny" => {
            Finding::warning(topic, found, format!("for large buffers: echo advise > {path}"))
        }
        _ => Finding::ok(topic, found),
    }
}

fn locked_memory() -> Finding {
    let topic = "locked memory";
    match getrlimit(Resource::Memlock).current {
        None => Finding::ok(topic, "unlimited"),
        Some(limit) if limit >= LOCKED_BYTES_ENOUGH => {
            Finding::ok(topic, format!("at most {}", Size(limit)))
        }
        Some(limit)
            if fs::read_to_string("/proc/self/status").is_ok_and(|text| may_lock(&text)) =>
        {
            let found =
                format!("at most {}, not enforced for this user (CAP_IPC_LOCK)", Size(limit));
            Finding::ok(topic, found)
        }
        Some(limit) => Finding::warning(
            topic,
            format!("at most {}", Size(limit)),
            "enough for the host backend; rdma needs more for registered memory: ulimit -l unlimited",
        ),
    }
}

/// Returns whether a process with this content of `/proc/self/status` may lock memory beyond its
/// limit.
fn may_lock(status: &str) -> bool {
    const IPC_LOCK: u32 = 14;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    effective.is_some_and(|capabilities| capabilities >> IPC_LOCK & 1 == 1)
}

fn descriptors() -> Finding {
    let topic = "open files";
    match getrlimit(Resource::Nofile).current {
        None => Finding::ok(topic, "unlimited"),
        Some(limit) if limit >= DESCRIPTORS_ENOUGH => {
            Finding::ok(topic, format!("at most {limit}"))
        }
        Some(limit) => Finding::warning(
            topic,
            format!("at most {limit}"),
            "many ranks need more descriptors: ulimit -n 4096",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_capability_to_lock_memory_is_read() {
        assert!(may_lock("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(may_lock("CapEff:\t0000000000004000\n"));
        assert!(!may_lock("CapEff:\t0000000000003fff\n"));
        assert!(!may_lock("CapPrm:\tffffffffffffffff\n"));
    }
}

//! Which host this process is on, as far as sharing memory goes.
//!
//! Two processes can share memory if they run on one kernel and can find each other there. The
//! first is the kernel's boot id, which containers of one host share; the second is the network
//! namespace, because the descriptors of shared memory travel over an abstract socket, which lives
//! in one. Where the kernel does not show both, the host name stands in; without a name no other
//! process counts as near.

use std::{fs, process};

/// Equal in two processes if and only if they can share memory.
pub(super) fn id() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let network = fs::read_link("/proc/self/ns/net");
    match (boot, network) {
        (Ok(boot), Ok(network)) => format!("{}/{}", boot.trim(), network.display()),
        _ => name(),
    }
}

fn name() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname")
        .or_else(|_| fs::read_to_string("/etc/hostname"))
        .unwrap_or_default();
    match name.trim() {
        "" => format!("process {}", process::id()),
        name => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_the_same_twice_and_holds_boot_id_and_network_namespace() {
        assert_eq!(id(), id());
        let (boot, network) = id().split_once('/').map(|(b, n)| (b.len(), n.to_owned())).unwrap();
        assert_eq!(boot, 36);
        assert!(network.starts_with("net:["), "{network}");
    }
}

//! Inspects the ports, the addresses and the dma-buf support of RDMA NICs.

use std::fs;

use peerlane::rdma::{self, Device, LinkLayer, Port};

use super::Finding;
use crate::units::Size;

/// The folder in which the kernel lists RDMA devices.
const DEVICES: &str = "/sys/class/infiniband";
/// The maximum payload of an RDMA packet in bytes.
const PACKET_BYTES_MAX: u32 = 4096;

/// Returns the report lines about every NIC, and about devices that the kernel has and libibverbs does not open.
pub(super) fn inspect() -> Vec<Finding> {
    // Without the library, the section of backends reports the reason.
    let Ok(devices) = rdma::discover() else { return Vec::new() };
    let known = names_in(DEVICES);
    let mut findings: Vec<_> = unopened(&known, &devices).into_iter().collect();
    for device in &devices {
        findings.push(nic(device));
        findings.extend(device.ports.iter().flat_map(|port| port_findings(device, port)));
        findings.push(dmabuf(&device.name, rdma::probe_dmabuf(&device.name)));
    }
    findings
}

fn names_in(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Returns a report line about devices that the kernel has and libibverbs does not open.
fn unopened(known: &[String], devices: &[Device]) -> Option<Finding> {
    let is_open = |name: &&String| devices.iter().any(|device| device.name == **name);
    let missing: Vec<_> = known.iter().filter(|name| !is_open(name)).map(String::as_str).collect();
    (!missing.is_empty()).then(|| {
        Finding::missing(
            "providers",
            format!("the kernel has {}, but libibverbs does not open it", missing.join(", ")),
            "install the package ibverbs-providers or rdma-core; load ib_uverbs; in a container, pass \
             /dev/infiniband",
        )
    })
}

fn nic(device: &Device) -> Finding {
    let Device { name, firmware, queue_pairs_max, completion_vectors, .. } = device;
    let mut found = name.clone();
    if !firmware.is_empty() {
        found += &format!(", firmware {firmware}");
    }
    match &device.pci {
        Some(pci) => {
            found += &format!(", {pci}");
            if let Some(node) = memory_node(name) {
                found += &format!(" near memory node {node}");
            }
        }
        None => found += ", in software",
    }
    let plural = if *completion_vectors == 1 { "" } else { "s" };
    found += &format!(
        ", {completion_vectors} completion vector{plural}, {queue_pairs_max} queue pairs, regions of \
         up to {}",
        Size(device.region_bytes_max)
    );
    Finding::ok("NIC", found)
}

fn memory_node(name: &str) -> Option<u32> {
    let text = fs::read_to_string(format!("{DEVICES}/{name}/device/numa_node")).ok()?;
    text.trim().parse().ok()
}

fn port_findings(device: &Device, port: &Port) -> Vec<Finding> {
    let interface = port.best_gid().and_then(|gid| interface(&device.name, port.number, gid.index));
    let mut findings = vec![port_finding(&device.name, port, interface.as_deref())];
    if !port.gids.is_empty() {
        let gids: Vec<_> = port.gids.iter().map(ToString::to_string).collect();
        let found = format!("{} port {}: {}", device.name, port.number, gids.join(", "));
        findings.push(Finding::ok("addresses", found));
    }
    findings
}

/// Returns the network interface to which an address of a port belongs.
fn interface(device: &str, port: u8, index: u32) -> Option<String> {
    let file = format!("{DEVICES}/{device}/ports/{port}/gid_attrs/ndevs/{index}");
    fs::read_to_string(file).ok().map(|text| text.trim().to_owned())
}

fn port_finding(device: &str, port: &Port, interface: Option<&str>) -> Finding {
    let topic = "port";
    let ethernet = port.link == LinkLayer::Ethernet;
    let link = match port.link {
        LinkLayer::InfiniBand => "InfiniBand",
        LinkLayer::Ethernet => "Ethernet",
        _ => "another link",
    };
    let mut found = format!("{device} port {}: {}, {link}", port.number, port.state);
    if let Some(rate) = port.bytes_per_second {
        found += &format!(", {} Gb/s", rate * 8.0 / 1e9);
    }
    found += &format!(", MTU {}", port.mtu_bytes);
    if let Some(interface) = interface {
        found += &format!(", at {interface}");
    }
    let interface = interface.unwrap_or("its network interface");
    if !port.active {
        let advice = match (ethernet, port.state) {
            (false, "initializing" | "armed") => {
                "no subnet manager has configured the port: start opensm, or ask the network administrator"
                    .to_owned()
            }
            (true, _) => format!("see `rdma link`; bring {interface} up: ip link set … up"),
            (false, _) => "see `rdma link`, the cable and the switch".to_owned(),
        };
        return Finding::missing(topic, found, advice);
    }
    match port.best_gid() {
        Some(gid) => found += &format!(", uses {gid}"),
        None if ethernet => {
            found += ", no address that other hosts can reach";
            return Finding::missing(
                topic,
                found,
                "give its network interface an IP address, or select an address with --gid-index",
            );
        }
        None => {}
    }
    if ethernet && port.mtu_bytes < PACKET_BYTES_MAX {
        let advice = format!(
            "packets of {PACKET_BYTES_MAX} bytes need an MTU of 4200 or more on interfaces and \
             switches: ip link set {interface} mtu 9000"
        );
        return Finding::warning(topic, found, advice);
    }
    Finding::ok(topic, found)
}

fn dmabuf(name: &str, probe: Result<Result<(), rdma::DmabufRefusal>, rdma::Error>) -> Finding {
    let topic = "dma-buf";
    let refusal = match probe {
        Ok(Ok(())) => {
            let found = format!("{name} registers GPU memory (needs Linux 5.12 or newer)");
            return Finding::ok(topic, found);
        }
        Ok(Err(refusal)) => refusal.to_string(),
        Err(error) => error.to_string(),
    };
    let peer = fs::exists("/sys/module/nvidia_peermem").unwrap_or(false);
    let found = format!("{name} off: {refusal}");
    if peer {
        return Finding::ok(topic, format!("{found}; nvidia_peermem is loaded"));
    }
    Finding::warning(
        topic,
        found,
        "host memory is not affected; GPU memory needs a NIC, driver and kernel with dma-buf \
         support, or modprobe nvidia_peermem",
    )
}

#[cfg(test)]
mod tests {
    use peerlane::rdma::{Gid, GidKind};

    use super::*;

    fn port(state: &'static str, mtu_bytes: u32, gids: Vec<Gid>) -> Port {
        Port {
            number: 1,
            active: state == "active",
            state,
            link: LinkLayer::Ethernet,
            mtu_bytes,
            bytes_per_second: Some(12.5e9),
            message_bytes_max: 1 << 30,
            gids,
        }
    }

    fn gid(index: u32, bytes: [u8; 16]) -> Gid {
        Gid { index, bytes, kind: GidKind::RoceV2 }
    }

    fn mapped() -> Gid {
        gid(1, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1])
    }

    fn link_local() -> Gid {
        gid(0, [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1])
    }

    #[test]
    fn a_port_shows_its_address_or_its_fault() {
        let text = |port: &Port, at| port_finding("mlx5_0", port, at).text(4);
        let good = port("active", 4096, vec![link_local(), mapped()]);
        insta::assert_snapshot!(text(&good, Some("eth0")), @"  ok  port  mlx5_0 port 1: active, Ethernet, 100 Gb/s, MTU 4096, at eth0, uses 10.0.0.1 (RoCE v2, index 1)");
        insta::assert_snapshot!(text(&port("active", 1024, vec![mapped()]), Some("eth0")), @"
        --  port  mlx5_0 port 1: active, Ethernet, 100 Gb/s, MTU 1024, at eth0, uses 10.0.0.1 (RoCE v2, index 1)
                  → packets of 4096 bytes need an MTU of 4200 or more on interfaces and switches: ip link set eth0 mtu 9000
        ");
        insta::assert_snapshot!(text(&port("active", 4096, vec![link_local()]), None), @"
        no  port  mlx5_0 port 1: active, Ethernet, 100 Gb/s, MTU 4096, no address that other hosts can reach
                  → give its network interface an IP address, or select an address with --gid-index
        ");
        insta::assert_snapshot!(text(&port("down", 4096, vec![]), Some("eth0")), @"
        no  port  mlx5_0 port 1: down, Ethernet, 100 Gb/s, MTU 4096, at eth0
                  → see `rdma link`; bring eth0 up: ip link set … up
        ");
        let unmanaged = Port { link: LinkLayer::InfiniBand, ..port("initializing", 4096, vec![]) };
        insta::assert_snapshot!(text(&unmanaged, None), @"
        no  port  mlx5_0 port 1: initializing, InfiniBand, 100 Gb/s, MTU 4096
                  → no subnet manager has configured the port: start opensm, or ask the network administrator
        ");
    }

    #[test]
    fn devices_without_a_provider_are_named() {
        assert_eq!(unopened(&[], &[]), None);
        insta::assert_snapshot!(unopened(&["mlx5_0".into()], &[]).unwrap().text(9), @"
        no  providers  the kernel has mlx5_0, but libibverbs does not open it
                       → install the package ibverbs-providers or rdma-core; load ib_uverbs; in a container, pass /dev/infiniband
        ");
    }

    #[test]
    fn missing_dma_buf_support_has_a_reason() {
        assert_eq!(dmabuf("mlx5_0", Ok(Ok(()))).advice, None);
        let refused = dmabuf("rxe0", Ok(Err(rdma::DmabufRefusal::Library)));
        assert!(refused.found.starts_with("rxe0 off: libibverbs is older than rdma-core 34"));
    }
}

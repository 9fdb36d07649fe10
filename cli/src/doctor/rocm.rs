//! Inspects AMD GPUs, their links and the runtimes.

use peerlane::rocm::{self, Device, Error, Runtimes};

use super::{Finding, links};
use crate::units::Size;

/// Returns the report lines about every AMD GPU; empty without GPUs, which the section of backends reports.
pub(super) fn inspect() -> Vec<Finding> {
    let Ok(devices) = rocm::discover() else { return Vec::new() };
    let runtimes = rocm::runtimes();
    // Without an HSA runtime no device has an agent; the runtime finding reports that once.
    let agents = runtimes.as_ref().is_ok_and(|runtimes| runtimes.hsa.is_ok());
    let mut findings = runtime_findings(runtimes);
    findings.push(super::queues(rocm::hardware_queues()));
    findings.extend(devices.iter().map(|device| device_finding(device, agents)));
    findings.push(links::finding(
        devices.iter().map(|device| device.ordinal),
        link,
        "HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES may hide other GPUs",
        "peer access is off between some GPUs: rocm-smi --showtopo shows the links; over PCI Express \
         it needs large BARs, and an IOMMU that permits it",
    ));
    findings
}

fn runtime_findings(found: Result<Runtimes, Error>) -> Vec<Finding> {
    let runtimes = match found {
        Ok(runtimes) => runtimes,
        Err(error) => {
            return vec![Finding::warning(
                "runtime",
                error.to_string(),
                "run rocminfo to see whether the runtime works",
            )];
        }
    };
    let hip = format!("HIP {} ({})", runtimes.hip, runtimes.hip_file.display());
    let mut findings = vec![Finding::ok("runtime", hip)];
    findings.push(match &runtimes.hsa {
        Ok(hsa) => {
            let (major, minor) = hsa.interface;
            let file = hsa.file.display();
            Finding::ok("runtime", format!("HSA runtime, interface {major}.{minor} ({file})"))
        }
        Err(error) => Finding::warning(
            "runtime",
            error.as_str(),
            "without it copies use HIP streams, and SDMA engines cannot be selected",
        ),
    });
    if let Some(text) = runtimes.mismatch() {
        let advice =
            "different releases are not tested together: check LD_LIBRARY_PATH and ROCM_PATH";
        findings.push(Finding::warning("runtime", text, advice));
    }
    findings
}

fn device_finding(device: &Device, agents: bool) -> Finding {
    let Device { ordinal, name, pci, memory_bytes, compute_units, .. } = device;
    let mut found = format!(
        "{ordinal}: {name}, {}, {compute_units} compute units, {pci}, {}",
        Size(*memory_bytes),
        device.uuid_text()
    );
    if let Some(node) = device.numa_node {
        found += &format!(", NUMA node {node}");
    }
    if !agents {
        return Finding::ok("GPU", found);
    }
    match rocm::agent(device) {
        Ok(agent) => Finding::ok("GPU", format!("{found}, {}", agent.name)),
        Err(error) => {
            Finding::warning("GPU", format!("{found}; {error}"), "SDMA engines cannot be selected")
        }
    }
}

fn link(from: u32, to: u32) -> String {
    links::text(rocm::link(from, to).map(|link| (link.kind, link.peer_access)))
}

//! Inspects the capabilities, the links and the libraries of NVIDIA GPUs.

use peerlane::cuda::{self, ComputeMode, Device};

use super::{Finding, links};
use crate::cublas;
use crate::nccl::{self, Nccl};
use crate::units::Size;

/// Returns the report lines about every NVIDIA GPU; empty without GPUs, which the section of backends reports.
pub(super) fn inspect() -> Vec<Finding> {
    let Ok(devices) = cuda::discover() else { return Vec::new() };
    if devices.is_empty() {
        return Vec::new();
    }
    let mut findings = vec![driver(), super::queues(cuda::connections())];
    findings.extend(devices.iter().map(device));
    findings.extend(devices.iter().filter_map(limits));
    findings.extend(handles(&devices));
    findings.push(links(&devices));
    findings.push(nccl());
    findings.push(cublas());
    findings
}

fn driver() -> Finding {
    match cuda::driver_version() {
        Ok((major, minor)) => Finding::ok("driver", format!("CUDA {major}.{minor}")),
        Err(error) => Finding::warning(
            "driver",
            error.to_string(),
            "run nvidia-smi to see whether the driver works",
        ),
    }
}

fn device(device: &Device) -> Finding {
    let Device { ordinal, name, pci_bus_id, memory_bytes, copy_engines, .. } = device;
    let (major, minor) = device.compute_capability;
    let mut found = format!(
        "{ordinal}: {name}, {}, {copy_engines} copy engines, sm_{major}{minor}, {pci_bus_id}, {}",
        Size(*memory_bytes),
        device.uuid_text()
    );
    if device.mig {
        found += ", a MIG instance";
    }
    match device.compute_mode {
        ComputeMode::Shared => Finding::ok("GPU", found),
        ComputeMode::ExclusiveProcess => Finding::warning(
            "GPU",
            format!("{found}, only one process at a time"),
            "nvidia-smi -c DEFAULT, to let other programs use it at the same time",
        ),
        ComputeMode::Prohibited => {
            Finding::missing("GPU", format!("{found}, use is prohibited"), "nvidia-smi -c DEFAULT")
        }
        other => {
            Finding::warning("GPU", format!("{found}, compute mode {other:?}"), "nvidia-smi -q")
        }
    }
}

/// Returns a warning about the capabilities that the CUDA backend uses and the GPU lacks.
fn limits(device: &Device) -> Option<Finding> {
    let abilities = &device.abilities;
    let lacks: Vec<&str> = [
        (abilities.virtual_memory, "virtual memory management (cuMemCreate)"),
        (abilities.posix_handles, "memory handles as file descriptors"),
        (abilities.stream_values_64, "64-bit stream memory operations"),
        (!device.mig, "peers: MIG instances do not reach each other"),
    ]
    .into_iter()
    .filter_map(|(has, what)| (!has).then_some(what))
    .collect();
    if lacks.is_empty() {
        return None;
    }
    let found = format!("{}: lacks {}", device.ordinal, lacks.join("; "));
    Some(Finding::warning(
        "GPU limits",
        found,
        "a newer driver may have it; for MIG: nvidia-smi -mig 0",
    ))
}

/// Tries on each GPU which kinds of memory can be allocated and shared with other processes.
fn handles(devices: &[Device]) -> Vec<Finding> {
    let of = |device: &Device| {
        let trials = cuda::try_handles(device.ordinal);
        trials.map_err(|error| error.to_string()).map(|trials| {
            [
                ("file descriptor", trials.posix.err().map(|error| error.to_string())),
                ("legacy IPC", trials.legacy.err().map(|error| error.to_string())),
                ("fabric", trials.fabric.err().map(|error| error.to_string())),
            ]
        })
    };
    devices.iter().map(|device| handle_finding(device.ordinal, of(device))).collect()
}

type Trials = [(&'static str, Option<String>); 3];

fn handle_finding(ordinal: u32, trials: Result<Trials, String>) -> Finding {
    let topic = "handles";
    let trials = match trials {
        Ok(trials) => trials,
        Err(error) => {
            let found = format!("{ordinal}: cannot be tried: {error}");
            return Finding::warning(topic, found, "check whether another process uses the GPU");
        }
    };
    let works: Vec<_> =
        trials.iter().filter(|(_, refusal)| refusal.is_none()).map(|(name, _)| *name).collect();
    let off: Vec<_> = trials
        .iter()
        .filter_map(|(name, refusal)| Some(format!("{name} off: {}", refusal.as_ref()?)))
        .collect();
    let works = if works.is_empty() { "none".to_owned() } else { works.join(", ") };
    let mut found = format!("{ordinal}: {works}");
    if !off.is_empty() {
        found += &format!("; {}", off.join("; "));
    }
    // Fabric handles serve NVLink between hosts; one host does not need them.
    match trials {
        [(_, None), (_, None), _] => Finding::ok(topic, found),
        [(_, Some(_)), (_, Some(_)), _] => Finding::missing(
            topic,
            found,
            "memory cannot be shared with another process: check the messages of the driver in dmesg",
        ),
        _ => Finding::warning(
            topic,
            found,
            "memory of one kind cannot be shared with another process",
        ),
    }
}

fn links(devices: &[Device]) -> Finding {
    links::finding(
        devices.iter().map(|device| device.ordinal),
        link,
        "CUDA_VISIBLE_DEVICES may hide other GPUs",
        "P2P is off between some GPUs: nvidia-smi topo -p2p r shows the reason; in a virtual machine \
         or container, it depends on the host",
    )
}

fn link(from: u32, to: u32) -> String {
    links::text(cuda::link(from, to).map(|link| (link.kind, link.peer_access)))
}

fn nccl() -> Finding {
    match Nccl::open(None) {
        Ok(nccl) => {
            let others = nccl::LIBRARY.others(&nccl.path);
            let others: Vec<_> = others.iter().map(|path| path.display().to_string()).collect();
            let also = match others.is_empty() {
                true => String::new(),
                false => format!("; also installed: {}", others.join(", ")),
            };
            Finding::ok("NCCL", format!("{} ({}){also}", nccl.version(), nccl.path))
        }
        Err(error) => Finding::warning(
            "NCCL",
            error.text(),
            format!(
                "needed only for --vs nccl; give the path of the library with {} PATH",
                nccl::LIBRARY.option
            ),
        ),
    }
}

fn cublas() -> Finding {
    match cublas::LIBRARY.open(None) {
        Ok(found) => Finding::ok("cuBLAS", found.path),
        Err(error) => Finding::warning(
            "cuBLAS",
            error.text(),
            format!(
                "needed only for --overlap gemm; give the path of the library with {} PATH",
                cublas::LIBRARY.option
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unavailable_handle_has_a_reason() {
        let trials = [
            ("file descriptor", None),
            ("legacy IPC", None),
            ("fabric", Some("CUDA_ERROR_NOT_PERMITTED (800)".to_owned())),
        ];
        let text = |trials| handle_finding(1, trials).text(7);
        insta::assert_snapshot!(text(Ok(trials.clone())), @"  ok  handles  1: file descriptor, legacy IPC; fabric off: CUDA_ERROR_NOT_PERMITTED (800)");
        let mut worse = trials.clone();
        worse[1].1 = Some("refused".to_owned());
        insta::assert_snapshot!(text(Ok(worse)), @"
        --  handles  1: file descriptor; legacy IPC off: refused; fabric off: CUDA_ERROR_NOT_PERMITTED (800)
                     → memory of one kind cannot be shared with another process
        ");
        insta::assert_snapshot!(text(Err("busy".to_owned())), @"
        --  handles  1: cannot be tried: busy
                     → check whether another process uses the GPU
        ");
    }
}

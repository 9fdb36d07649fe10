//! Why there is no GPU: the runtimes only say that there is none.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// What the runtimes open first, and where the kernel lists what it knows.
const DEVICE: &str = "/dev/kfd";
const NODES: &str = "/sys/class/kfd/kfd/topology/nodes";
/// What hides GPUs from a process: of the HSA runtime, and of HIP on top of it.
const HIDING: [&str; 4] =
    ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"];

/// Why this process sees no GPU, and what to do.
pub(crate) fn why() -> String {
    let visible = visible(|name| std::env::var(name).ok());
    let kernel = Kernel { device: DEVICE.into(), nodes: NODES.into() };
    kernel.why(kernel.open(), &visible)
}

/// What hides GPUs from this process, as its environment says.
pub(crate) fn visible(variable: impl Fn(&str) -> Option<String>) -> String {
    let set: Vec<String> = HIDING
        .iter()
        .filter_map(|name| variable(name).map(|list| format!("{name} is \"{list}\"")))
        .collect();
    match set.as_slice() {
        [] => "neither ROCR_VISIBLE_DEVICES nor HIP_VISIBLE_DEVICES is set".to_owned(),
        set => set.join(" and "),
    }
}

/// The kernel's part of the driver.
struct Kernel {
    device: PathBuf,
    nodes: PathBuf,
}

impl Kernel {
    fn open(&self) -> io::Result<()> {
        OpenOptions::new().read(true).write(true).open(&self.device).map(drop)
    }

    fn why(&self, opened: io::Result<()>, visible: &str) -> String {
        let device = self.device.display();
        match opened {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return format!(
                    "there is no {device}: is there an AMD GPU, and is the kernel module amdgpu loaded? \
                     A container needs --device=/dev/kfd --device=/dev/dri"
                );
            }
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                return format!(
                    "{device} cannot be opened: {error}; add the user to the group that owns it, \
                     usually render"
                );
            }
            Err(error) => return format!("{device} cannot be opened: {error}"),
        }
        match gpus(&self.nodes) {
            0 => format!("{device} is there, and the kernel knows no GPU; see dmesg for amdgpu"),
            count => {
                let plural = if count == 1 { "" } else { "s" };
                format!(
                    "the kernel knows {count} GPU{plural}, none of them visible here: {visible}"
                )
            }
        }
    }
}

/// How many of the kernel's nodes have shader units; processors have none.
fn gpus(nodes: &Path) -> usize {
    let nodes = fs::read_dir(nodes).into_iter().flatten().flatten();
    let properties =
        nodes.filter_map(|node| fs::read_to_string(node.path().join("properties")).ok());
    properties
        .filter(|text| {
            let mut lines = text.lines().filter_map(|line| line.split_once(' '));
            lines.any(|(name, value)| name == "simd_count" && value.trim() != "0")
        })
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    const VISIBLE: &str = "HIP_VISIBLE_DEVICES is \"\"";

    fn folder(name: &str) -> PathBuf {
        let name = format!("peerlane-rocm-absence-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn no_device_of_the_kernel() {
        let kernel = Kernel { device: "/dev/peerlane-none".into(), nodes: "/none".into() };
        assert_eq!(
            kernel.why(kernel.open(), VISIBLE),
            "there is no /dev/peerlane-none: is there an AMD GPU, and is the kernel module amdgpu \
             loaded? A container needs --device=/dev/kfd --device=/dev/dri"
        );
    }

    #[test]
    fn a_device_that_cannot_be_opened() {
        let kernel = Kernel { device: DEVICE.into(), nodes: "/none".into() };
        // Root may open any file, so the answer of the system is given here.
        let refused = |number| kernel.why(Err(io::Error::from_raw_os_error(number)), VISIBLE);
        assert_eq!(
            refused(13),
            "/dev/kfd cannot be opened: Permission denied (os error 13); add the user to the group \
             that owns it, usually render"
        );
        assert_eq!(refused(5), "/dev/kfd cannot be opened: Input/output error (os error 5)");
    }

    #[test]
    fn no_gpu_and_hidden_ones() {
        let folder = folder("nodes");
        let (device, nodes) = (folder.join("kfd"), folder.join("nodes"));
        fs::write(&device, "").unwrap();
        for (node, simd) in [("0", "0"), ("1", "1216"), ("2", "1216")] {
            fs::create_dir_all(nodes.join(node)).unwrap();
            let text = format!("cpu_cores_count 0\nsimd_count {simd}\nmem_banks_count 1\n");
            fs::write(nodes.join(node).join("properties"), text).unwrap();
        }
        let kernel = Kernel { device: device.clone(), nodes };
        let hidden = kernel.why(kernel.open(), VISIBLE);
        let none = Kernel { nodes: folder.join("none"), ..kernel }.why(Ok(()), VISIBLE);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(
            hidden,
            "the kernel knows 2 GPUs, none of them visible here: HIP_VISIBLE_DEVICES is \"\""
        );
        assert_eq!(
            none,
            format!(
                "{} is there, and the kernel knows no GPU; see dmesg for amdgpu",
                device.display()
            )
        );
    }

    #[test]
    fn what_hides_is_said() {
        assert_eq!(
            visible(|_| None),
            "neither ROCR_VISIBLE_DEVICES nor HIP_VISIBLE_DEVICES is set"
        );
        assert_eq!(
            visible(|name| name.ends_with("VISIBLE_DEVICES").then(|| "7".to_owned())),
            "ROCR_VISIBLE_DEVICES is \"7\" and HIP_VISIBLE_DEVICES is \"7\" and CUDA_VISIBLE_DEVICES \
             is \"7\""
        );
    }
}

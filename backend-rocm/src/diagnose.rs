//! Finds out why this process sees no GPU. The runtimes report only that there is none.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// The device file of AMD's kernel driver, which HIP and the HSA runtime open first.
const DEVICE: &str = "/dev/kfd";
/// The folder in which AMD's kernel driver lists processors and GPUs.
const NODES: &str = "/sys/class/kfd/kfd/topology/nodes";
/// The environment variables that hide GPUs from a process. The HSA runtime reads the first, HIP
/// all.
const VISIBILITY_VARIABLES: [&str; 4] =
    ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"];

pub(crate) fn why_no_gpu() -> String {
    let visible = visibility(|name| std::env::var(name).ok());
    let kernel = KernelDriver { device: DEVICE.into(), nodes: NODES.into() };
    kernel.diagnose(kernel.open(), &visible)
}

/// Returns whether the kernel driver has a device file that this process cannot open.
pub(crate) fn is_kernel_driver_refused() -> bool {
    is_refused(&KernelDriver { device: DEVICE.into(), nodes: NODES.into() }.open())
}

fn is_refused(opened: &io::Result<()>) -> bool {
    opened.as_ref().is_err_and(|error| error.kind() != ErrorKind::NotFound)
}

pub(crate) fn visibility(variable: impl Fn(&str) -> Option<String>) -> String {
    let set: Vec<String> = VISIBILITY_VARIABLES
        .iter()
        .filter_map(|name| variable(name).map(|list| format!("{name} is {list:?}")))
        .collect();
    match set.as_slice() {
        [] => "neither ROCR_VISIBLE_DEVICES nor HIP_VISIBLE_DEVICES is set".to_owned(),
        set => set.join(" and "),
    }
}

struct KernelDriver {
    device: PathBuf,
    nodes: PathBuf,
}

impl KernelDriver {
    fn open(&self) -> io::Result<()> {
        OpenOptions::new().read(true).write(true).open(&self.device).map(drop)
    }

    fn diagnose(&self, opened: io::Result<()>, visible: &str) -> String {
        let device = self.device.display();
        match opened {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return format!(
                    "{device} does not exist; check that the machine has an AMD GPU and that the \
                     kernel module amdgpu is loaded (containers: --device=/dev/kfd \
                     --device=/dev/dri)"
                );
            }
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                return format!(
                    "cannot open {device}: {error}; add the user to the group that owns the file, \
                     usually render"
                );
            }
            Err(error) => return format!("cannot open {device}: {error}"),
        }
        match count_gpus(&self.nodes) {
            0 => {
                format!(
                    "{device} exists, but the kernel driver lists no GPU; check the messages of \
                     amdgpu in dmesg"
                )
            }
            count => {
                let plural = if count == 1 { "" } else { "s" };
                format!(
                    "the kernel driver lists {count} GPU{plural}, but none is visible to this process: \
                     {visible}"
                )
            }
        }
    }
}

/// Counts the GPUs that the kernel driver lists, which are the nodes with shader units.
fn count_gpus(nodes: &Path) -> usize {
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
        let name = format!("peerlane-rocm-diagnose-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn no_kernel_driver() {
        let kernel = KernelDriver { device: "/dev/peerlane-none".into(), nodes: "/none".into() };
        assert_eq!(
            kernel.diagnose(kernel.open(), VISIBLE),
            "/dev/peerlane-none does not exist; check that the machine has an AMD GPU and that the \
             kernel module amdgpu is loaded (containers: --device=/dev/kfd --device=/dev/dri)"
        );
    }

    #[test]
    fn a_device_that_cannot_be_opened() {
        let kernel = KernelDriver { device: DEVICE.into(), nodes: "/none".into() };
        // Root may open any file, so the result of the system call is given here.
        let refused = |number| kernel.diagnose(Err(io::Error::from_raw_os_error(number)), VISIBLE);
        assert_eq!(
            refused(13),
            "cannot open /dev/kfd: Permission denied (os error 13); add the user to the group that \
             owns the file, usually render"
        );
        assert_eq!(refused(5), "cannot open /dev/kfd: Input/output error (os error 5)");
        let is_refused = |number| is_refused(&Err(io::Error::from_raw_os_error(number)));
        assert_eq!([2, 5, 13].map(is_refused), [false, true, true]);
    }

    #[test]
    fn no_gpu_and_hidden_gpus() {
        let folder = folder("nodes");
        let (device, nodes) = (folder.join("kfd"), folder.join("nodes"));
        fs::write(&device, "").unwrap();
        for (node, simd) in [("0", "0"), ("1", "1216"), ("2", "1216")] {
            fs::create_dir_all(nodes.join(node)).unwrap();
            let text = format!("cpu_cores_count 0\nsimd_count {simd}\nmem_banks_count 1\n");
            fs::write(nodes.join(node).join("properties"), text).unwrap();
        }
        let kernel = KernelDriver { device: device.clone(), nodes };
        let hidden = kernel.diagnose(kernel.open(), VISIBLE);
        let none = KernelDriver { nodes: folder.join("none"), ..kernel }.diagnose(Ok(()), VISIBLE);
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(
            hidden,
            "the kernel driver lists 2 GPUs, but none is visible to this process: HIP_VISIBLE_DEVICES \
             is \"\""
        );
        assert_eq!(
            none,
            format!(
                "{} exists, but the kernel driver lists no GPU; check the messages of amdgpu in \
                 dmesg",
                device.display()
            )
        );
    }

    #[test]
    fn variables_that_hide_gpus_are_listed() {
        assert_eq!(
            visibility(|_| None),
            "neither ROCR_VISIBLE_DEVICES nor HIP_VISIBLE_DEVICES is set"
        );
        assert_eq!(
            visibility(|name| name.ends_with("VISIBLE_DEVICES").then(|| "7".to_owned())),
            "ROCR_VISIBLE_DEVICES is \"7\" and HIP_VISIBLE_DEVICES is \"7\" and CUDA_VISIBLE_DEVICES \
             is \"7\""
        );
    }
}

//! Inspects the library of UCX, and the network devices that it can use.

use peerlane::ucx::{self, Device};

use super::Finding;

/// Returns the report lines about the library and every network device; empty without the library,
/// which the section of backends reports.
pub(super) fn inspect() -> Vec<Finding> {
    let Ok(devices) = ucx::discover() else { return Vec::new() };
    let library = match ucx::version() {
        Ok(version) => Finding::ok("library", format!("UCX {version}")),
        Err(error) => Finding::warning(
            "library",
            error.to_string(),
            "run ucx_info -v to see whether it works",
        ),
    };
    std::iter::once(library).chain(device_findings(&devices)).collect()
}

/// Returns one report line for each device, with the transports of the device.
fn device_findings(devices: &[Device]) -> impl Iterator<Item = Finding> {
    let of_device = devices.chunk_by(|one, next| one.name == next.name);
    of_device.map(|all| {
        let transports: Vec<_> = all.iter().map(|device| device.transport.as_str()).collect();
        Finding::ok("device", format!("{}: {}", all[0].name, transports.join(", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_one_line_with_its_transports() {
        let device = |(name, transport): (&str, &str)| Device {
            name: name.to_owned(),
            transport: transport.to_owned(),
        };
        let devices = [("eth0", "tcp"), ("mlx5_0:1", "rc_verbs"), ("mlx5_0:1", "ud_verbs")];
        let lines: Vec<_> = device_findings(&devices.map(device)).map(|line| line.found).collect();
        assert_eq!(lines, ["eth0: tcp", "mlx5_0:1: rc_verbs, ud_verbs"]);
    }
}

//! What each backend discovers, in its own words.

use peerlane::hal::Error;
use peerlane::{cuda, host, rdma, rocm};

use super::finding::Finding;

/// Asks every backend.
pub(super) fn look() -> Vec<Finding> {
    vec![
        finding("host", host::discover(), |device| device.name.clone(), "mount /proc"),
        finding(
            "cuda",
            cuda::discover(),
            |device| device.name.clone(),
            "it needs libcuda.so.1, which the NVIDIA driver brings",
        ),
        finding(
            "rocm",
            rocm::discover(),
            |device| device.name.clone(),
            "it needs libamdhip64.so and libhsa-runtime64.so.1, which ROCm brings",
        ),
        finding(
            "rdma",
            rdma::discover(),
            |device| device.name.clone(),
            "it needs libibverbs.so.1, which the package libibverbs1 or rdma-core brings, and a network \
             card",
        ),
    ]
}

fn finding<D, E: Error>(
    backend: &'static str,
    discovered: Result<Vec<D>, E>,
    name: impl Fn(&D) -> String,
    advice: &str,
) -> Finding {
    match discovered {
        Err(error) => Finding::missing(backend, error.to_string(), advice),
        Ok(devices) if devices.is_empty() => Finding::missing(backend, "no device", advice),
        Ok(devices) => {
            let plural = if devices.len() == 1 { "" } else { "s" };
            let names: Vec<_> = devices.iter().map(name).collect();
            let count = devices.len();
            Finding::ok(backend, format!("{count} device{plural}: {}", names.join(", ")))
        }
    }
}

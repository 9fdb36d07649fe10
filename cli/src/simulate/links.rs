//! The links of a simulation: those that are known, those of a file, and single figures.

use std::path::PathBuf;

use clap::Args;
use peerlane::cost::{Calibration, Link, Links};

use crate::error::{Failure, Result};

/// Figures of links.
#[derive(Args, Clone, Debug)]
pub(crate) struct Figures {
    /// Links as JSON, or what `peerlane calibrate` has written
    #[arg(long, value_name = "FILE")]
    links: Option<PathBuf>,
    /// What one rank sends, and receives, inside its node, in GB/s (10^9 bytes a second)
    #[arg(long, value_name = "GB/s")]
    local_gbs: Option<f64>,
    /// The same between nodes
    #[arg(long, value_name = "GB/s")]
    network_gbs: Option<f64>,
    /// How long a flag takes inside a node, in microseconds
    #[arg(long, value_name = "µs")]
    local_us: Option<f64>,
    /// The same between nodes
    #[arg(long, value_name = "µs")]
    network_us: Option<f64>,
    /// Network cards of a node, which its ranks share [default: one for each rank]
    #[arg(long, value_name = "N")]
    nics: Option<u32>,
    /// What a network card carries in each direction, in GB/s [default: as much as its ranks send]
    #[arg(long, value_name = "GB/s")]
    nic_gbs: Option<f64>,
}

impl Figures {
    /// The links that are asked for.
    ///
    /// # Errors
    /// If the file cannot be read, or a figure is impossible.
    pub(super) fn links(&self) -> Result<Links> {
        let mut links = self.file()?.unwrap_or_default();
        let giga = 1e9;
        for (gigabytes, microseconds, link) in [
            (self.local_gbs, self.local_us, &mut links.local),
            (self.network_gbs, self.network_us, &mut links.network),
        ] {
            if let Some(gigabytes) = gigabytes {
                set_rate(link, gigabytes * giga);
            }
            if let Some(microseconds) = microseconds {
                link.flag_seconds = microseconds / 1e6;
            }
        }
        links.node.nics = self.nics.or(links.node.nics);
        let nic = self.nic_gbs.map(|gigabytes| gigabytes * giga);
        // Cards that are shared without a limit would be no limit.
        let shared = self.nics.map(|_| links.network.engine_bytes_per_second);
        links.node.nic_bytes_per_second = nic.or(links.node.nic_bytes_per_second).or(shared);
        links.check().map_err(|error| Failure::usage(format!("links: {error}")))?;
        Ok(links)
    }

    fn file(&self) -> Result<Option<Links>> {
        let Some(path) = &self.links else { return Ok(None) };
        let what = path.display();
        let text = std::fs::read_to_string(path)
            .map_err(|error| Failure::io(format_args!("cannot read {what}"), &error))?;
        if let Ok(calibration) = serde_json::from_str::<Calibration>(&text) {
            return Ok(Some(calibration.links));
        }
        serde_json::from_str(&text).map(Some).map_err(|error| {
            Failure::usage(format!("{what} holds no links: {error}"))
                .with_advice("take what `peerlane calibrate` writes, or its field links")
        })
    }
}

/// One flow, an engine and a rank carry the same.
fn set_rate(link: &mut Link, bytes_per_second: f64) {
    link.bytes_per_second = bytes_per_second;
    link.engine_bytes_per_second = bytes_per_second;
    link.send_bytes_per_second = bytes_per_second;
    link.receive_bytes_per_second = bytes_per_second;
}

//! Describes the latencies and bandwidths of links, from which the cost model predicts times.
//!
//! All figures are in seconds and bytes per second, as `f64`, and rates count one direction. They
//! are only added, multiplied and divided, so results are equal on all machines; times are compared
//! as [whole picoseconds](picoseconds). A figure without a source is marked *assumed*: calibrate
//! before relying on it.

use peerlane_hal::wire::checksum;
use peerlane_hal::{ErrorKind, LinkKind};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::plan::{Algorithm, FlagOrder, Tier};

/// The latencies and bandwidths of all links of a rank, and the resources that the ranks of a node
/// share.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Links {
    /// The kind of engines to which the figures belong, such as `streams`; empty if they belong to
    /// any kind.
    #[serde(default)]
    pub engine: String,
    /// The link of a rank to itself, for copies from its input to its output and for flags between
    /// its lanes.
    pub own: Link,
    /// The link to the ranks of the same node, or of [`Tier::Local`].
    pub local: Link,
    /// The link to the ranks of other nodes, over [`Tier::Network`].
    pub network: Link,
    /// The resources that the ranks of one node share.
    pub node: Node,
    /// The fixed time in seconds that each run of an operation takes in addition to its copies and
    /// flags.
    pub start_seconds: f64,
    /// The time in seconds that each local engine after the first adds to an operation.
    ///
    /// The engine is forked from the stream and joined to it.
    pub lane_seconds: f64,
    /// The corrections at measured sizes, where measured times differ from predicted ones.
    #[serde(default)]
    pub residuals: Vec<Residual>,
}

/// The latencies and bandwidths of one link.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// The latency of a put in seconds (α). Its lane is occupied during this time.
    pub put_seconds: f64,
    /// The latency of a get in seconds. Its lane is occupied during this time.
    pub get_seconds: f64,
    /// The time in seconds from the signal of a flag until the waiting engine continues.
    ///
    /// This time begins when the step before the signal ends.
    pub flag_seconds: f64,
    /// The time in seconds that an engine needs for a signal, or for a wait that is already
    /// fulfilled.
    pub step_seconds: f64,
    /// The time in seconds that the host takes to submit a put to an engine. Engines that are
    /// slower than that hide it.
    pub submit_seconds: f64,
    /// The bandwidth of a single put in bytes per second (1 / β).
    pub bytes_per_second: f64,
    /// The bandwidth of a single get in bytes per second; `None` if it equals that of a put.
    pub get_bytes_per_second: Option<f64>,
    /// The bandwidth of forwarding bytes that have just been received and are still in a cache;
    /// `None` for no limit.
    ///
    /// The cache is that of the peer that has put the bytes here.
    pub passed_on_bytes_per_second: Option<f64>,
    /// The additional latency in seconds of forwarding bytes that have just been received.
    #[serde(default)]
    pub passed_on_seconds: f64,
    /// The bandwidth of all copies of one engine together, in each direction.
    pub engine_bytes_per_second: f64,
    /// The bandwidth of all copies out of one rank together.
    pub send_bytes_per_second: f64,
    /// The bandwidth of all copies into one rank together (incast).
    pub receive_bytes_per_second: f64,
    /// The number of puts that one engine executes at the same time, at least 1. With 1, a put
    /// begins when the one before it has ended.
    pub puts_in_flight: u32,
    /// Whether a thread of the rank makes the copies, instead of a copy engine or a NIC.
    ///
    /// The thread makes one copy at a time for all lanes of its rank. On a node, as many ranks copy
    /// at the same time as there are [processors](Node::processors).
    pub by_processor: bool,
}

impl Links {
    /// Returns typical latencies and bandwidths for a kind of local link and a kind of network.
    pub fn of_kinds(local: LinkKind, network: LinkKind) -> Self {
        let gpu = matches!(local, LinkKind::NvLink | LinkKind::Xgmi | LinkKind::Pcie);
        let own = if gpu { Link::self_copy_of_gpu() } else { Link::of_kind(LinkKind::Local) };

        Self {
            engine: String::new(),
            own,
            local: Link::of_kind(local),
            network: Link::of_kind(network),
            node: Node::default(),
            // Between the sum of the steps and what 4 KiB take on 4 x H200
            // (docs/perf/beside-nccl.md); assumed for the others.
            start_seconds: if gpu { 10e-6 } else { 2e-6 },
            // Fitted to the runs of docs/perf/cost-cuda.md; assumed for others.
            lane_seconds: if gpu { 8e-6 } else { 0.0 },
            residuals: Vec::new(),
        }
    }

    /// Returns the fixed time of one run of an operation, without its copies and flags.
    ///
    /// The unit is picoseconds. The operation has `local_lanes` lanes of [`Tier::Local`].
    pub fn start(&self, local_lanes: usize) -> u64 {
        // The first lane is a part of every start.
        let further_lanes = local_lanes.saturating_sub(1) as u64;
        let further = picoseconds(self.lane_seconds).saturating_mul(further_lanes);

        picoseconds(self.start_seconds).saturating_add(further)
    }

    /// Returns the link that a copy over `tier` uses, or [`own`](Self::own) if `to_self` is true.
    pub fn link_of_tier(&self, tier: Tier, to_self: bool) -> &Link {
        match tier {
            _ if to_self => &self.own,
            Tier::Local => &self.local,
            Tier::Network => &self.network,
        }
    }

    /// Returns a hash of all latencies and bandwidths, by which ranks check that they use the same
    /// ones.
    pub fn fingerprint(&self) -> u64 {
        // Plain data always encodes; floats as their bits.
        checksum(&postcard::to_stdvec(self).unwrap_or_default())
    }

    /// Checks that all latencies, rates and factors are within their bounds.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument), naming the field.
    pub fn check(&self) -> Result<(), Error> {
        let links = [("own", &self.own), ("local", &self.local), ("network", &self.network)];
        for (name, link) in links {
            link.check(name)?;
        }

        check_seconds("start_seconds", self.start_seconds)?;
        check_seconds("lane_seconds", self.lane_seconds)?;

        self.node.check()?;
        check_residuals(&self.residuals)
    }

    /// Returns links whose bandwidths account for caches, if one rank reads and writes `bytes`
    /// bytes per operation.
    ///
    /// Between two points of [`Node::cache_factors`] the time per byte is interpolated.
    #[must_use]
    pub fn adjusted_to(&self, bytes: u64) -> Self {
        let mut links = self.clone();
        // The rates include the factors from now on, so a second adjustment must not find them.
        links.node.cache_factors.clear();

        let [times, gets] = self.node.factors(bytes);
        for link in [&mut links.own, &mut links.local, &mut links.network] {
            if link.by_processor {
                // This comes before `bytes_per_second` changes, the default of the rate of gets.
                let get = link.get_bytes_per_second.unwrap_or(link.bytes_per_second);
                link.get_bytes_per_second = Some(get / gets);
                link.bytes_per_second /= times;
                link.engine_bytes_per_second /= times;
                link.send_bytes_per_second /= times;
                link.receive_bytes_per_second /= times;
            }
        }

        links
    }
}

impl Default for Links {
    /// Returns typical links of GPUs that use NVLink inside a node and RDMA between nodes.
    fn default() -> Self {
        Self::of_kinds(LinkKind::NvLink, LinkKind::Rdma)
    }
}

impl Link {
    /// A bandwidth in bytes per second that is too high to limit copies by processors.
    pub const UNLIMITED: f64 = 1e12;

    /// Returns a link with typical latencies and bandwidths for its kind, such as NVLink or
    /// InfiniBand.
    pub fn of_kind(kind: LinkKind) -> Self {
        let (put_seconds, flag_seconds, step_seconds, flow, engine, puts_in_flight) = match kind {
            // As measured on 4 x H200 with 18 links each: 1.9 µs for each of a chain of
            // copies of 4 KiB; 13 µs for a flag there and back; one pair 396 GB/s, three peers at
            // once 392 GB/s, on the two streams that an engine uses.
            LinkKind::NvLink => (1.9e-6, 6.5e-6, 0.3e-6, 396e9, 392e9, 2),
            // Assumed: 4th generation, 64 GB/s a link and direction on paper, 48 in use; 7 links.
            LinkKind::Xgmi => (3e-6, 8e-6, 0.5e-6, 48e9, 48e9, 2),
            // Assumed: 5th generation, 16 lanes: 64 GB/s on paper, 50 in use.
            LinkKind::Pcie => (2.5e-6, 8e-6, 0.5e-6, 50e9, 50e9, 2),
            // Assumed: two copies over PCI Express, one behind the other.
            LinkKind::HostStaged => (5e-6, 10e-6, 0.5e-6, 25e9, 25e9, 1),
            // Assumed: 400 Gb/s, 96 % of it in use; a write is there in 2 µs, its completion seen
            // and the flag set in 1 µs more.
            LinkKind::Rdma => (0.2e-6, 3e-6, 0.2e-6, 48e9, 48e9, 64),
            // UCX 1.13.1 over TCP between two network namespaces: 9 µs for 8 B, 11 µs for 1 KiB, 16
            // µs for 8 KiB, 0.37 ms for 1 MiB. The system calls of the sender and of the receiver
            // take about half of the 9 µs each, so a signal and a wait occupy their threads.
            LinkKind::Network => (3.5e-6, 0.5e-6, 2.5e-6, 2.8e9, 2.8e9, 1),
            // Assumed: a copy by one core; a flag is a line that goes from one core to another.
            _ => (0.1e-6, 1e-6, 0.05e-6, 10e9, 10e9, 1),
        };

        let device = matches!(kind, LinkKind::NvLink | LinkKind::Xgmi | LinkKind::Pcie);
        let shared_memory = matches!(kind, LinkKind::Local | LinkKind::SharedMemory);
        // Processors of several ranks copy from and to the memory of one rank at the same time.
        let of_rank = if shared_memory { Link::UNLIMITED } else { engine };

        Self {
            put_seconds,
            get_seconds: put_seconds,
            flag_seconds,
            step_seconds,
            // 4 to 5 µs for 3 copies in one call (docs/perf/cuda-submission.md); assumed for
            // others.
            submit_seconds: match kind {
                _ if device => 1.5e-6,
                LinkKind::Rdma => 0.1e-6,
                LinkKind::Network => 3.5e-6,
                _ => 0.0,
            },
            bytes_per_second: flow,
            get_bytes_per_second: None,
            passed_on_bytes_per_second: None,
            passed_on_seconds: 0.0,
            engine_bytes_per_second: engine,
            send_bytes_per_second: of_rank,
            receive_bytes_per_second: of_rank,
            puts_in_flight,
            by_processor: shared_memory || kind == LinkKind::Network,
        }
    }

    /// Returns the link of a GPU to itself, for copies inside its memory.
    fn self_copy_of_gpu() -> Self {
        // The bandwidth of copies inside an H200; assumed for other GPUs.
        let rate = 2136e9;

        Self {
            put_seconds: 1.9e-6,
            get_seconds: 1.9e-6,
            flag_seconds: 2e-6,
            step_seconds: 0.3e-6,
            submit_seconds: 2e-6,
            bytes_per_second: rate,
            get_bytes_per_second: None,
            passed_on_bytes_per_second: None,
            passed_on_seconds: 0.0,
            engine_bytes_per_second: rate,
            send_bytes_per_second: rate,
            receive_bytes_per_second: rate,
            puts_in_flight: 1,
            by_processor: false,
        }
    }

    /// Checks that all fields are in their bounds, and reports them in errors as fields of `link`.
    fn check(&self, link: &str) -> Result<(), Error> {
        for (name, seconds) in [
            ("put_seconds", self.put_seconds),
            ("get_seconds", self.get_seconds),
            ("flag_seconds", self.flag_seconds),
            ("step_seconds", self.step_seconds),
            ("submit_seconds", self.submit_seconds),
            ("passed_on_seconds", self.passed_on_seconds),
        ] {
            check_seconds(&format!("{link}.{name}"), seconds)?;
        }

        for (name, rate) in [
            ("bytes_per_second", self.bytes_per_second),
            ("engine_bytes_per_second", self.engine_bytes_per_second),
            ("send_bytes_per_second", self.send_bytes_per_second),
            ("receive_bytes_per_second", self.receive_bytes_per_second),
        ] {
            check_rate(&format!("{link}.{name}"), rate)?;
        }
        for (name, rate) in [
            ("get_bytes_per_second", self.get_bytes_per_second),
            ("passed_on_bytes_per_second", self.passed_on_bytes_per_second),
        ] {
            rate.map_or(Ok(()), |rate| check_rate(&format!("{link}.{name}"), rate))?;
        }

        if self.puts_in_flight == 0 {
            return Err(invalid(format!("{link}.puts_in_flight is 0, expected at least 1")));
        }

        Ok(())
    }
}

/// Converts seconds to whole picoseconds, and saturates at about half a year.
pub fn picoseconds(seconds: f64) -> u64 {
    // A cast from a float saturates.
    (seconds * 1e12).round() as u64
}

/// Returns the time in picoseconds to transfer `bytes` bytes at a given bandwidth, rounded up.
pub fn transfer_picoseconds(bytes: u64, bytes_per_second: f64) -> u64 {
    (bytes as f64 * 1e12 / bytes_per_second).ceil() as u64
}

fn check_seconds(name: &str, seconds: f64) -> Result<(), Error> {
    if seconds.is_finite() && (0.0..=1e3).contains(&seconds) {
        return Ok(());
    }
    Err(invalid(format!("{name} is {seconds}, expected 0 to 1000 seconds")))
}

pub(super) fn check_rate(name: &str, rate: f64) -> Result<(), Error> {
    if rate.is_finite() && (1.0..=1e18).contains(&rate) {
        return Ok(());
    }
    Err(invalid(format!("{name} is {rate}, expected 1 to 1e18 bytes per second")))
}

pub(super) fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

/// The resources that the ranks of one node share.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// The number of NICs of a node; `None` if each rank has a NIC of its own. The rank with local
    /// index l uses NIC l mod this number.
    pub nics: Option<u32>,
    /// The rate of one NIC in each direction; `None` if the NIC does not limit its lanes.
    pub nic_bytes_per_second: Option<f64>,
    /// The number of processors of a node; `None` if there is at least one for each rank.
    pub processors: Option<u32>,
    /// The bandwidth of all copies by processors of a node together; `None` if there is no such
    /// limit.
    pub copy_bytes_per_second: Option<f64>,
    /// The factors by which copies by processors become slower if an operation does not fit into
    /// the caches.
    ///
    /// They are for links with [`by_processor`](Link::by_processor), in ascending order of memory;
    /// empty for no effect.
    pub cache_factors: Vec<CacheFactor>,
}

/// The slowdown of copies by processors in operations that use a certain amount of memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheFactor {
    /// The number of bytes that one rank reads and writes in one run of an operation.
    pub bytes: u64,
    /// The factor by which copies take longer than predicted without cache effects.
    pub factor: f64,
    /// The slowdown factor for gets; `None` if it equals the factor for puts.
    ///
    /// Puts write remote memory and gets read it, and caches treat both differently.
    pub gets_factor: Option<f64>,
}

impl Node {
    pub(super) fn check(&self) -> Result<(), Error> {
        let Self { nics, nic_bytes_per_second, processors, copy_bytes_per_second, cache_factors } =
            self;

        for (name, count) in [("node.nics", nics), ("node.processors", processors)] {
            if *count == Some(0) {
                return Err(invalid(format!("{name} is 0, expected at least 1, or no value")));
            }
        }

        let rates = [
            ("node.nic_bytes_per_second", nic_bytes_per_second),
            ("node.copy_bytes_per_second", copy_bytes_per_second),
        ];
        for (name, rate) in rates {
            rate.map_or(Ok(()), |rate| check_rate(name, rate))?;
        }

        check_cache_factors(cache_factors)
    }

    /// Returns the slowdown factors of puts and of gets if one rank reads and writes `bytes` bytes.
    pub(super) fn factors(&self, bytes: u64) -> [f64; 2] {
        let gets = |point: &CacheFactor| point.gets_factor.unwrap_or(point.factor);
        [
            interpolate(&self.cache_factors, bytes, |point| point.factor),
            interpolate(&self.cache_factors, bytes, gets),
        ]
    }
}

/// Interpolates `factor` between the two points of `factors` whose memory sizes enclose `bytes`.
///
/// Below the first point and above the last one, the factor of that point counts.
fn interpolate(factors: &[CacheFactor], bytes: u64, factor: impl Fn(&CacheFactor) -> f64) -> f64 {
    let next = factors.partition_point(|point| point.bytes <= bytes);
    let before = next.checked_sub(1).map(|before| &factors[before]);

    match (before, factors.get(next)) {
        (None, None) => 1.0,
        (Some(only), None) | (None, Some(only)) => factor(only),
        (Some(low), Some(high)) => {
            let share = (bytes - low.bytes) as f64 / (high.bytes - low.bytes) as f64;
            factor(low) + share * (factor(high) - factor(low))
        }
    }
}

/// Checks that factors are in their bounds and in strictly ascending order of memory.
fn check_cache_factors(factors: &[CacheFactor]) -> Result<(), Error> {
    for (index, point) in factors.iter().enumerate() {
        let CacheFactor { bytes, factor, gets_factor } = *point;
        let both = [("factor", Some(factor)), ("gets_factor", gets_factor)];
        for (name, times) in both {
            if let Some(times) = times.filter(|times| !(1e-3..=1e3).contains(times)) {
                let text = format!("node.cache_factors[{index}].{name} is {times}");
                return Err(invalid(format!("{text}, expected 0.001 to 1000")));
            }
        }

        // The interpolation finds a point by bisection, and ignores the first of two equal values.
        if index > 0 && factors[index - 1].bytes >= bytes {
            let before = factors[index - 1].bytes;
            let text = format!(
                "node.cache_factors[{index}].bytes is {bytes}, expected more than {before}, the \
                 value before it"
            );
            return Err(invalid(text));
        }
    }

    Ok(())
}

/// The ratio of measured to predicted time for all-gathers of one size.
///
/// All blocks have equal length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Residual {
    /// The algorithm of the measured all-gather, with any number of chunks.
    pub algorithm: Algorithm,
    /// Whether the measured operation was in place.
    pub in_place: bool,
    /// The number of output buffers that the measured operation alternated between.
    pub outputs: u32,
    /// The order of signals, waits and copies in the measured operation.
    pub flags: FlagOrder,
    /// Whether a network connected the nodes, as a tier of its own; otherwise one fabric connected
    /// all ranks.
    pub tiers: bool,
    /// The length of each block in bytes.
    pub block_bytes: u64,
    /// The measured time divided by the predicted time, [`FACTOR_MIN`](Self::FACTOR_MIN) to
    /// [`FACTOR_MAX`](Self::FACTOR_MAX).
    pub factor: f64,
}

impl Residual {
    /// The smallest allowed ratio of measured to predicted time.
    pub const FACTOR_MIN: f64 = 1e-3;
    /// The largest allowed ratio of measured to predicted time.
    pub const FACTOR_MAX: f64 = 1e3;
}

fn check_residuals(residuals: &[Residual]) -> Result<(), Error> {
    let least = Residual::FACTOR_MIN;
    let most = Residual::FACTOR_MAX;

    for (index, Residual { factor, .. }) in residuals.iter().enumerate() {
        if !(least..=most).contains(factor) {
            let text = format!("residuals[{index}].factor is {factor}");
            return Err(invalid(format!("{text}, expected {least} to {most}")));
        }
    }

    Ok(())
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    #[test]
    fn what_is_known_without_a_measurement_is_possible() {
        use LinkKind::{HostStaged, Network, NvLink, Pcie, Rdma, SharedMemory, Xgmi};
        for local in [SharedMemory, NvLink, Xgmi, Pcie, HostStaged] {
            Links::of_kinds(local, Rdma).check().unwrap();
            Links::of_kinds(local, Network).check().unwrap();
        }
    }

    #[test]
    fn links_survive_json() {
        let links = Links::default();
        let text = serde_json::to_string(&links).unwrap();
        assert_eq!(serde_json::from_str::<Links>(&text).unwrap(), links);
    }

    #[test]
    fn links_of_before_are_read() {
        let mut links = Links::of_kinds(LinkKind::SharedMemory, LinkKind::Rdma);
        links.node.cache_factors = vec![CacheFactor { bytes: 1, factor: 1.0, gets_factor: None }];
        let mut value = serde_json::to_value(&links).unwrap();
        for link in ["own", "local", "network"] {
            for figure in ["get_bytes_per_second", "passed_on_seconds"] {
                value[link].as_object_mut().unwrap().remove(figure).unwrap();
            }
        }
        value["node"]["cache_factors"][0].as_object_mut().unwrap().remove("gets_factor").unwrap();
        assert_eq!(serde_json::from_value::<Links>(value).unwrap(), links);
    }

    #[test]
    fn impossible_figures_are_named() {
        let text = |change: fn(&mut Links)| {
            let mut links = Links::default();
            change(&mut links);
            links.check().unwrap_err().to_string()
        };
        assert_snapshot!(text(|links| links.local.bytes_per_second = 0.0), @"local.bytes_per_second is 0, expected 1 to 1e18 bytes per second");
        assert_snapshot!(text(|links| links.own.put_seconds = -1.0), @"own.put_seconds is -1, expected 0 to 1000 seconds");
        assert_snapshot!(text(|links| links.network.puts_in_flight = 0), @"network.puts_in_flight is 0, expected at least 1");
        assert_snapshot!(text(|links| links.node.nics = Some(0)), @"node.nics is 0, expected at least 1, or no value");
        assert_snapshot!(text(|links| links.local.get_bytes_per_second = Some(0.5)), @"local.get_bytes_per_second is 0.5, expected 1 to 1e18 bytes per second");
        assert_snapshot!(text(|links| links.own.passed_on_seconds = -2.0), @"own.passed_on_seconds is -2, expected 0 to 1000 seconds");
        assert_snapshot!(text(|links| links.start_seconds = f64::NAN), @"start_seconds is NaN, expected 0 to 1000 seconds");
    }

    #[test]
    fn times_are_whole_and_saturate() {
        assert_eq!(picoseconds(1.5e-6), 1_500_000);
        assert_eq!(transfer_picoseconds(1, 3e12), 1);
        assert_eq!(transfer_picoseconds(u64::MAX, 1.0), u64::MAX);
    }

    #[test]
    fn copies_beyond_the_caches_take_longer() {
        let mut links = Links::of_kinds(LinkKind::SharedMemory, LinkKind::Rdma);
        let factors = [(1000, 1.0), (3000, 2.0)];
        let point = |(bytes, factor)| CacheFactor { bytes, factor, gets_factor: None };
        links.node.cache_factors = factors.map(point).to_vec();
        links.check().unwrap();
        let rate = |links: &Links, bytes| links.adjusted_to(bytes).local.bytes_per_second;
        let rates = [0, 1000, 2000, 3000, 9000].map(|bytes| rate(&links, bytes));
        assert_eq!(rates, [10e9, 10e9, 10e9 / 1.5, 5e9, 5e9]);
        assert_eq!(links.adjusted_to(9000).network, links.network);
        let gets = |links: &Links| links.adjusted_to(2000).local.get_bytes_per_second;
        assert_eq!(gets(&links), Some(10e9 / 1.5));
        links.node.cache_factors[1].gets_factor = Some(4.0);
        assert_eq!((gets(&links), rate(&links, 2000)), (Some(10e9 / 2.5), 10e9 / 1.5));
        links.node.cache_factors.reverse();
        assert_snapshot!(links.check().unwrap_err(), @"node.cache_factors[1].bytes is 1000, expected more than 3000, the value before it");
    }

    #[test]
    fn impossible_residuals_are_named() {
        let residual = |factor| Residual {
            algorithm: Algorithm::Pull,
            in_place: false,
            outputs: 1,
            flags: FlagOrder::Prompt,
            tiers: false,
            block_bytes: 8,
            factor,
        };
        let links = Links { residuals: vec![residual(1.0), residual(0.0)], ..Links::default() };
        let text = links.check().unwrap_err().to_string();
        assert_eq!(text, "residuals[1].factor is 0, expected 0.001 to 1000");
    }
}

//! The resources that the ranks of a node share: NICs, processors and memory.

use serde::{Deserialize, Serialize};

use super::links::{check_rate, invalid};
use crate::error::Error;

/// The resources that the ranks of one node share.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// The number of NICs; `None` if each rank has its own. The rank with local index l uses NIC l mod this number.
    pub nics: Option<u32>,
    /// The rate of one NIC in each direction; `None` if it does not limit its lanes.
    pub nic_bytes_per_second: Option<f64>,
    /// The number of processors of a node; `None` if there is at least one for each rank.
    pub processors: Option<u32>,
    /// The rate of all copies by processors of a node together; `None` if there is no such limit.
    pub copy_bytes_per_second: Option<f64>,
    /// How rates of copies [by processors](super::Link::by_processor) decrease when a start uses more memory than the caches
    /// hold; ascending, empty for no decrease.
    pub reach: Vec<Reach>,
}

/// The rate of copies in starts that use a certain amount of memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reach {
    /// Bytes that one rank reads and writes in a start: its input and its outputs.
    pub bytes: u64,
    /// The factor by which a byte takes longer than the links say.
    pub times_longer: f64,
    /// The factor for gets; `None` if it is that of puts. Puts write remote memory and gets read it, and caches treat both
    /// differently.
    pub gets_times_longer: Option<f64>,
}

impl Node {
    /// # Errors
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument): a figure is not one, naming the
    /// field.
    pub(super) fn check(&self) -> Result<(), Error> {
        let Self { nics, nic_bytes_per_second, processors, copy_bytes_per_second, reach } = self;
        for (name, count) in [("node.nics", nics), ("node.processors", processors)] {
            if *count == Some(0) {
                return Err(invalid(format!("{name} is 0, expected at least 1 or nothing")));
            }
        }
        let rates = [
            ("node.nic_bytes_per_second", nic_bytes_per_second),
            ("node.copy_bytes_per_second", copy_bytes_per_second),
        ];
        for (name, rate) in rates {
            rate.map_or(Ok(()), |rate| check_rate(name, rate))?;
        }
        check_reach(reach)
    }

    /// Returns the factors for puts and for gets in starts that use `bytes` bytes.
    pub(super) fn times_longer(&self, bytes: u64) -> [f64; 2] {
        let gets = |point: &Reach| point.gets_times_longer.unwrap_or(point.times_longer);
        [
            times_longer(&self.reach, bytes, |point| point.times_longer),
            times_longer(&self.reach, bytes, gets),
        ]
    }
}

/// What `of` says of the points, between those around `bytes`.
fn times_longer(reach: &[Reach], bytes: u64, of: impl Fn(&Reach) -> f64) -> f64 {
    let behind = reach.partition_point(|point| point.bytes <= bytes);
    match (behind.checked_sub(1).map(|before| reach[before]), reach.get(behind)) {
        (None, None) => 1.0,
        (Some(only), None) => of(&only),
        (None, Some(only)) => of(only),
        (Some(low), Some(high)) => {
            let share = (bytes - low.bytes) as f64 / (high.bytes - low.bytes) as f64;
            of(&low) + share * (of(high) - of(&low))
        }
    }
}

fn check_reach(reach: &[Reach]) -> Result<(), Error> {
    for (index, point) in reach.iter().enumerate() {
        let Reach { bytes, times_longer, gets_times_longer } = *point;
        let both = [("times_longer", Some(times_longer)), ("gets_times_longer", gets_times_longer)];
        for (name, times) in both {
            if let Some(times) = times.filter(|times| !(1e-3..=1e3).contains(times)) {
                let text = format!("node.reach[{index}].{name} is {times}");
                return Err(invalid(format!("{text}, expected 0.001 to 1000")));
            }
        }
        if index > 0 && reach[index - 1].bytes >= bytes {
            let before = reach[index - 1].bytes;
            let text = format!("node.reach[{index}].bytes is {bytes}, behind {before}");
            return Err(invalid(format!("{text}; expected ascending ones")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;
    use peerlane_hal::LinkKind;

    use super::*;
    use crate::cost::links::Links;

    #[test]
    fn copies_beyond_the_caches_take_longer() {
        let mut links = Links::of_kinds(LinkKind::SharedMemory, LinkKind::Rdma);
        let reach = [(1000, 1.0), (3000, 2.0)];
        let point = |(bytes, times_longer)| Reach { bytes, times_longer, gets_times_longer: None };
        links.node.reach = reach.map(point).to_vec();
        links.check().unwrap();
        let rate = |links: &Links, bytes| links.reaching(bytes).local.bytes_per_second;
        let rates = [0, 1000, 2000, 3000, 9000].map(|bytes| rate(&links, bytes));
        assert_eq!(rates, [10e9, 10e9, 10e9 / 1.5, 5e9, 5e9]);
        assert_eq!(links.reaching(9000).network, links.network);
        let gets = |links: &Links| links.reaching(2000).local.get_bytes_per_second;
        assert_eq!(gets(&links), Some(10e9 / 1.5));
        links.node.reach[1].gets_times_longer = Some(4.0);
        assert_eq!((gets(&links), rate(&links, 2000)), (Some(10e9 / 2.5), 10e9 / 1.5));
        links.node.reach.reverse();
        assert_snapshot!(links.check().unwrap_err(), @"node.reach[1].bytes is 1000, behind 3000; expected ascending ones");
    }
}

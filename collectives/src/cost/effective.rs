//! The rates and latencies of a link while several ranks use it.

use super::links::{Link, Links, picoseconds, transfer_picoseconds};
use crate::plan::Tier;

/// A link as one rank sees it: latencies in picoseconds, and the remaining rates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EffectiveLink {
    put: u64,
    get: u64,
    /// Additional latency of bytes that a peer has just put here.
    passed_on_put: u64,
    passed_on: f64,
    in_flight: u64,
    flow: f64,
    get_flow: f64,
    /// All flows of the lane together, and all of the rank.
    lane: f64,
    send: f64,
    /// Into the rank.
    receive: f64,
    pub(crate) step: u64,
    pub(crate) hop: u64,
    pub(crate) submit: u64,
    pub(crate) by_processor: bool,
}

impl EffectiveLink {
    /// Creates the view of a rank of a node with `node_ranks` ranks, of which `senders` use the link at the same time.
    pub(crate) fn new(links: &Links, tier: Option<Tier>, node_ranks: u64, senders: u64) -> Self {
        let link = links.of(tier.unwrap_or_default(), tier.is_none());
        let Link { put_seconds, get_seconds, step_seconds, flag_seconds, submit_seconds, .. } =
            *link;
        let senders = senders.max(1);
        let mut slower = 1.0;
        let mut shared = f64::INFINITY;
        if link.by_processor {
            let processors = links.node.processors.map_or(node_ranks, u64::from).max(1);
            slower = (node_ranks as f64 / processors as f64).max(1.0);
            let copies = node_ranks.min(processors) as f64;
            shared = links.node.copy_bytes_per_second.map_or(shared, |all| all / copies);
        }
        if tier == Some(Tier::Network)
            && let Some(nics) = links.node.nics
        {
            let nic = links.node.nic_bytes_per_second.unwrap_or(link.engine_bytes_per_second);
            let busy = senders.min(nics.into()) as f64;
            shared = shared.min(nic * busy / senders as f64);
        }
        let get_flow = link.get_bytes_per_second.unwrap_or(link.bytes_per_second);
        let lane = link.engine_bytes_per_second.min(link.send_bytes_per_second);
        let stretched = |seconds: f64| picoseconds(seconds * slower);
        Self {
            put: stretched(put_seconds),
            get: stretched(get_seconds),
            passed_on_put: stretched(link.passed_on_seconds),
            passed_on: link.passed_on_bytes_per_second.unwrap_or(f64::INFINITY) / slower,
            in_flight: link.puts_in_flight.max(1).into(),
            flow: link.bytes_per_second.min(shared) / slower,
            get_flow: get_flow.min(shared) / slower,
            lane: lane.min(shared) / slower,
            send: link.send_bytes_per_second.min(shared) / slower,
            receive: link.receive_bytes_per_second.min(shared) / slower,
            step: stretched(step_seconds),
            hop: picoseconds(flag_seconds),
            submit: picoseconds(submit_seconds),
            by_processor: link.by_processor,
        }
    }

    /// Returns the time of `count` puts of `bytes` bytes in total.
    ///
    /// If several can be in flight, the lane continues while the bytes of the last ones move.
    pub(crate) fn puts(&self, count: u64, bytes: u64) -> u64 {
        self.copies(self.put, self.flow, count, bytes)
    }

    /// The same of gets.
    pub(crate) fn gets(&self, count: u64, bytes: u64) -> u64 {
        self.copies(self.get, self.get_flow, count, bytes)
    }

    /// Returns the additional time of `count` puts of `bytes` bytes in total that peers have just put here.
    pub(crate) fn passed_on(&self, count: u64, bytes: u64) -> u64 {
        let first = count.saturating_mul(self.passed_on_put);
        first.saturating_add(transfer_picoseconds(bytes, self.passed_on))
    }

    fn copies(&self, each: u64, flow: f64, count: u64, bytes: u64) -> u64 {
        if count == 0 {
            return 0;
        }
        let latency = count.saturating_mul(each);
        if self.in_flight == 1 {
            return latency.saturating_add(transfer_picoseconds(bytes, self.together(flow, 1)));
        }
        let last = transfer_picoseconds(bytes / count, self.together(flow, 1));
        let all = transfer_picoseconds(bytes, self.together(flow, count));
        latency.saturating_add(last).max(each.saturating_add(all))
    }

    /// Returns the rate of `count` concurrent puts together.
    pub(crate) fn rate(&self, count: u64) -> f64 {
        self.together(self.flow, count)
    }

    /// The same of gets.
    pub(crate) fn rate_of_gets(&self, count: u64) -> f64 {
        self.together(self.get_flow, count)
    }

    fn together(&self, flow: f64, count: u64) -> f64 {
        self.lane.min(flow * self.in_flight.min(count).max(1) as f64)
    }

    /// Returns the shortest time in which a rank sends `bytes` bytes with all its lanes.
    pub(crate) fn sends(&self, bytes: u64) -> u64 {
        transfer_picoseconds(bytes, self.send)
    }

    /// Returns the shortest time in which a rank receives `bytes` bytes.
    pub(crate) fn receives(&self, bytes: u64) -> u64 {
        transfer_picoseconds(bytes, self.receive)
    }
}

#[cfg(test)]
mod tests {
    use peerlane_hal::LinkKind;

    use super::*;

    #[test]
    fn puts_share_an_engine_and_overlap_in_flight() {
        let mut links = Links::of_kinds(LinkKind::NvLink, LinkKind::Rdma);
        links.local.put_seconds = 1e-6;
        links.local.puts_in_flight = 2;
        links.local.bytes_per_second = 100e9;
        links.local.engine_bytes_per_second = 150e9;
        links.local.send_bytes_per_second = 200e9;
        let seen = EffectiveLink::new(&links, Some(Tier::Local), 4, 4);
        // One put alone has the flow's rate, two together the engine's, two lanes the rank's.
        assert_eq!(seen.puts(1, 100_000), 2_000_000);
        assert_eq!(seen.puts(3, 150_000), 3_500_000);
        assert_eq!(seen.puts(3, 1_500_000), 11_000_000);
        assert_eq!(seen.sends(200_000), 1_000_000);
        assert_eq!(seen.puts(0, 0), 0);
    }

    #[test]
    fn ranks_share_network_cards() {
        let mut links = Links::default();
        links.network.put_seconds = 0.0;
        links.node.nics = Some(2);
        links.node.nic_bytes_per_second = Some(40e9);
        let time =
            |senders| EffectiveLink::new(&links, Some(Tier::Network), 8, senders).puts(1, 40_000);
        assert_eq!([1, 2, 8].map(time), [1_000_000, 1_000_000, 4_000_000]);
    }

    #[test]
    fn ranks_share_processors_and_memory() {
        let mut links = Links::of_kinds(LinkKind::SharedMemory, LinkKind::Rdma);
        links.local.put_seconds = 1e-6;
        links.node.processors = Some(2);
        let time = |links: &Links, ranks| {
            EffectiveLink::new(links, Some(Tier::Local), ranks, ranks).puts(1, 10_000)
        };
        assert_eq!([1, 2, 4].map(|ranks| time(&links, ranks)), [2_000_000, 2_000_000, 4_000_000]);
        links.node.copy_bytes_per_second = Some(10e9);
        assert_eq!([1, 2, 4].map(|ranks| time(&links, ranks)), [2_000_000, 3_000_000, 6_000_000]);
    }
}

//! Selects which SDMA engines make the copies over each link.
//!
//! Newer runtimes report which engines serve a link best. Older ones report only which are idle, without
//! regard to the link. Those are divided among the links, because two links that share an engine while
//! another is idle lose half of their rate. Without either report the engines are known by number: the
//! general engines come first, and those made for XGMI start at [`XGMI_FIRST`].

use std::fmt;

use peerlane_hal::LinkKind;
use peerlane_toolkit::Fault;
use peerlane_toolkit::device::DeviceContext as _;
use peerlane_toolkit::peers::ConnectedPeer;

use super::hsa;
use super::set::SdmaSet;
use crate::device::{
    Agent, AgentKind, Context, agents, find_agent, find_device, link_between, uuid_text,
    visible_devices,
};
use crate::engine::rate_of_engines;
use crate::error::Error;
use crate::sys::Hsa;

/// The number of the first SDMA engine for XGMI, which does not depend on the number of general engines.
const XGMI_FIRST: u32 = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkClass {
    SameGpu,
    Xgmi,
    /// A link that is not XGMI, such as PCI Express.
    Pcie,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkInfo {
    pub(crate) class: LinkClass,
    pub(crate) can_select: bool,
    pub(crate) preferred: Option<SdmaSet>,
    pub(crate) idle: Option<SdmaSet>,
    pub(crate) general: u32,
    pub(crate) xgmi: u32,
    pub(crate) index: usize,
    pub(crate) links: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SelectedBy {
    Preference,
    Idle,
    Number,
    /// The runtime selects an SDMA engine for each copy and does not report it.
    Runtime,
}

/// The SDMA engines for one direction of a link; the set is empty if the runtime selects an engine for each copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Selection {
    pub(crate) set: SdmaSet,
    pub(crate) by: SelectedBy,
}

impl Selection {
    pub(crate) const RUNTIME: Self = Self { set: SdmaSet::EMPTY, by: SelectedBy::Runtime };

    pub(crate) fn new(link: &LinkInfo) -> Self {
        if !link.can_select {
            return Self::RUNTIME;
        }
        let general = SdmaSet::range(0, link.general);
        if link.class == LinkClass::SameGpu && !general.is_empty() {
            return Self { set: general, by: SelectedBy::Number };
        }
        if let Some(set) = link.preferred.filter(|set| !set.is_empty()) {
            return Self { set, by: SelectedBy::Preference };
        }
        // A GPU without engines for XGMI uses the general ones for every link.
        let suitable = match link.class {
            LinkClass::Xgmi if link.xgmi > 0 => SdmaSet::range(XGMI_FIRST, link.xgmi),
            // The first general engine is for copies from the host; some GPUs accept no other for them.
            _ if link.general > 1 => SdmaSet::range(1, link.general - 1),
            _ => general,
        };
        let idle = link.idle.unwrap_or_default().intersection(suitable);
        let (set, by) = match idle.is_empty() {
            false => (idle, SelectedBy::Idle),
            true => (suitable, SelectedBy::Number),
        };
        match set.is_empty() {
            false => Self { set: set.share(link.index, link.links), by },
            true => Self::RUNTIME,
        }
    }
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let set = self.set;
        match self.by {
            SelectedBy::Preference => write!(f, "SDMA {set} (preferred)"),
            SelectedBy::Idle => write!(f, "SDMA {set} (of those idle)"),
            SelectedBy::Number => write!(f, "SDMA {set} (by number)"),
            SelectedBy::Runtime => f.write_str("SDMA of the runtime's choice"),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerEngines {
    pub(crate) put: Selection,
    pub(crate) get: Selection,
}

pub(super) fn agent_of_peer(
    hsa: &Hsa,
    context: &Context,
    agents: &[Agent],
    own: &Agent,
    peer: &ConnectedPeer,
) -> Result<(Agent, LinkClass), Error> {
    let class = match peer.kind {
        LinkKind::Local => return Ok((own.clone(), LinkClass::SameGpu)),
        // The memory that the peer shares is host memory.
        LinkKind::HostStaged => {
            let host = agents.iter().find(|agent| agent.kind == AgentKind::Processor);
            return host.map(|host| (host.clone(), LinkClass::Pcie)).ok_or_else(|| {
                Error::unavailable(
                    "the HSA runtime reports no agent for the processors of the host",
                )
            });
        }
        LinkKind::Xgmi => LinkClass::Xgmi,
        _ => LinkClass::Pcie,
    };
    let uuid = uuid_text(&peer.device);
    let mut matching = agents.iter().filter(|agent| agent.uuid.eq_ignore_ascii_case(&uuid));
    if let (Some(agent), None) = (matching.next(), matching.next()) {
        return Ok((agent.clone(), class));
    }
    let hidden = || {
        Error::Fault(Fault::Unavailable(format!(
            "the device of rank {} (UUID {uuid}) is not visible to the HSA runtime ({}) of {}; add \
             that device to ROCR_VISIBLE_DEVICES, or use EngineKind::Streams",
            peer.peer,
            hsa.calls.file().display(),
            context.label()
        )))
    };
    let device = find_device(context.hip, &peer.device)?.ok_or_else(hidden)?;
    Ok((find_agent(agents, &device)?, class))
}

pub(super) fn engines_for_peer(
    hsa: &Hsa,
    peers: &[Option<(Agent, LinkClass)>],
    own: &Agent,
    index: usize,
) -> Option<PeerEngines> {
    let (peer, class) = peers[index].as_ref()?;
    // Ranks on one device share its links.
    let mut links: Vec<u64> = Vec::new();
    for (other, _) in peers.iter().flatten().filter(|(_, other)| other == class) {
        if !links.contains(&other.handle.handle) {
            links.push(other.handle.handle);
        }
    }
    let is_remote = *class != LinkClass::SameGpu;
    // A runtime that does not report the counts may still prefer some.
    let (general, xgmi) = own.sdma_engine_counts(hsa).unwrap_or_default();
    let selection = Selection::new(&LinkInfo {
        class: *class,
        can_select: hsa::can_select_engine(hsa),
        preferred: is_remote.then(|| hsa::preferred_engines(hsa, own, peer)).flatten(),
        idle: is_remote.then(|| hsa::idle_engines(hsa, own, peer)).flatten(),
        general,
        xgmi,
        index: links.iter().position(|link| *link == peer.handle.handle).unwrap_or(0),
        links: links.len(),
    });
    Some(PeerEngines { put: selection, get: selection })
}

/// Returns the bandwidth over all SDMA engines of the slowest link in bytes per second.
///
/// Returns 0 if there is no other device or if a rate is not known.
pub(crate) fn striped_rate(context: &Context) -> u64 {
    link_rates(context).ok().and_then(|rates| rates.into_iter().min()).unwrap_or(0)
}

fn link_rates(context: &Context) -> Result<Vec<u64>, Error> {
    let hsa = Hsa::load()?;
    let all = agents(hsa)?;
    let own = find_agent(&all, &context.info)?;
    let (mut peers, mut links) = (Vec::new(), Vec::new());
    for device in visible_devices(context.hip)? {
        let link = link_between(context.hip, &context.info, &device)?;
        let class = match link.kind {
            LinkKind::Local => continue,
            LinkKind::Xgmi => LinkClass::Xgmi,
            _ => LinkClass::Pcie,
        };
        peers.push(Some((find_agent(&all, &device)?, class)));
        links.push(link.bytes_per_second);
    }
    let engines = |index| {
        engines_for_peer(hsa, &peers, &own, index).map_or(0, |engines| engines.put.set.len())
    };
    let rate = |(index, link): (usize, &Option<f64>)| rate_of_engines(engines(index), *link);
    Ok(links.iter().enumerate().map(rate).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::sdma::set::SdmaId;

    const XGMI: LinkInfo = LinkInfo {
        class: LinkClass::Xgmi,
        can_select: true,
        preferred: None,
        idle: None,
        general: 2,
        xgmi: 14,
        index: 0,
        links: 7,
    };

    fn selected(link: LinkInfo) -> (Vec<usize>, SelectedBy) {
        let selection = Selection::new(&link);
        (selection.set.ids().map(SdmaId::index).collect(), selection.by)
    }

    #[test]
    fn engines_that_the_runtime_prefers_come_first() {
        let mask = SdmaSet::from_mask;
        let link = LinkInfo { preferred: Some(mask(0x40)), idle: Some(mask(0xfffc)), ..XGMI };
        assert_eq!(selected(link), (vec![6], SelectedBy::Preference));
        let link = LinkInfo { preferred: Some(mask(0)), ..link };
        assert_eq!(selected(link), (vec![2, 3], SelectedBy::Idle), "no engine is preferred");
    }

    #[test]
    fn links_have_disjoint_engines() {
        let mut all = Vec::new();
        for index in 0..7 {
            let (ids, by) = selected(LinkInfo { index, ..XGMI });
            assert_eq!((ids.len(), by), (2, SelectedBy::Number));
            all.extend(ids);
        }
        assert_eq!(all, (2..16).collect::<Vec<_>>());
        // If there are more links than engines, they take turns. A single link has all engines.
        let few = LinkInfo { xgmi: 3, ..XGMI };
        let turns: Vec<_> = (0..7).map(|index| selected(LinkInfo { index, ..few }).0).collect();
        assert_eq!(turns, [[2], [3], [4], [2], [3], [4], [2]].map(Vec::from));
        assert_eq!(selected(LinkInfo { links: 1, ..few }).0, [2, 3, 4]);
    }

    #[test]
    fn idle_engines_of_another_kind_do_not_count() {
        let general = Some(SdmaSet::from_mask(0b11));
        assert_eq!(selected(LinkInfo { idle: general, links: 1, ..XGMI }).1, SelectedBy::Number);
        let pcie =
            LinkInfo { class: LinkClass::Pcie, idle: Some(SdmaSet::from_mask(0xffff)), ..XGMI };
        assert_eq!(selected(pcie), (vec![1], SelectedBy::Idle));
        assert_eq!(selected(LinkInfo { general: 1, ..pcie }).0, [0]);
    }

    #[test]
    fn self_copies_use_the_general_engines() {
        let same = LinkInfo { class: LinkClass::SameGpu, idle: None, ..XGMI };
        assert_eq!(selected(same), (vec![0, 1], SelectedBy::Number));
    }

    #[test]
    fn the_runtime_selects_if_engines_cannot_be_selected() {
        assert_eq!(selected(LinkInfo { can_select: false, ..XGMI }), (vec![], SelectedBy::Runtime));
        let uncounted = LinkInfo { general: 0, xgmi: 0, ..XGMI };
        assert_eq!(selected(uncounted), (vec![], SelectedBy::Runtime));
        assert_eq!(
            selected(LinkInfo { class: LinkClass::SameGpu, ..uncounted }),
            (vec![], SelectedBy::Runtime)
        );
        let preferred = LinkInfo { preferred: Some(SdmaSet::from_mask(8)), ..uncounted };
        assert_eq!(selected(preferred), (vec![3], SelectedBy::Preference));
        assert_eq!(Selection::RUNTIME.to_string(), "SDMA of the runtime's choice");
        let selection = Selection { set: SdmaSet::from_mask(0xc), by: SelectedBy::Idle };
        assert_eq!(selection.to_string(), "SDMA 2+3 (of those idle)");
    }
}

//! Making an engine: the agents of its peers, and the SDMA engines of each link.

use std::sync::Arc;

use peerlane_hal::{LinkKind, Rank};
use peerlane_toolkit::device::{DeviceContext as _, Fault};
use peerlane_toolkit::peers::Reached;

use super::Sdma;
use super::hsa::{self, HsaHardware};
use super::placement::{Facts, Placement, Reach};
use super::queue::Ways;
use crate::device::{
    Agent, AgentKind, Context, agents, between, find, find_agent, uuid_text, visible_devices,
};
use crate::engine::kind::rate_over;
use crate::error::Error;
use crate::sys::Hsa;

impl Sdma {
    /// An engine of `rank` that reaches these peers.
    ///
    /// # Errors
    /// [`Error::Unavailable`]: there is no HSA runtime, or a peer's device is hidden from it; its
    /// refusal.
    pub(crate) fn open(context: &Context, rank: Rank, peers: &[Reached]) -> Result<Self, Error> {
        let hsa = Hsa::load()?;
        let all = agents(hsa)?;
        let own = find_agent(&all, &context.found)?;
        let ranks = peers.iter().map(|peer| peer.peer.index() + 1).max().unwrap_or(0);
        let mut found: Vec<Option<(Agent, Reach)>> = vec![None; ranks];
        for peer in peers {
            found[peer.peer.index()] = Some(agent_of(hsa, context, &all, &own, peer)?);
        }
        let handles = found.iter().map(|found| found.as_ref().map(|(agent, _)| agent.handle));
        let label: &Arc<str> = context.label();
        let hardware = HsaHardware::open(hsa, label, &all, &own, handles.collect())?;
        let ways = (0..ranks).map(|index| ways_to(hsa, &found, &own, index));
        let ways = ways.collect();
        Ok(Self::over(hardware, rank, ways))
    }
}

/// The agent that stands for a peer, and what lies between.
fn agent_of(
    hsa: &Hsa,
    context: &Context,
    agents: &[Agent],
    own: &Agent,
    peer: &Reached,
) -> Result<(Agent, Reach), Error> {
    let reach = match peer.kind {
        LinkKind::Own => return Ok((own.clone(), Reach::Own)),
        // Its memory is the host's.
        LinkKind::HostStaged => {
            let host = agents.iter().find(|agent| agent.kind == AgentKind::Processor);
            return host.map(|host| (host.clone(), Reach::Pcie)).ok_or_else(|| {
                Error::unavailable("the HSA runtime has no agent for the host's processors")
            });
        }
        LinkKind::Xgmi => Reach::Xgmi,
        _ => Reach::Pcie,
    };
    let text = uuid_text(&peer.device);
    let mut named = agents.iter().filter(|agent| agent.uuid.eq_ignore_ascii_case(&text));
    if let (Some(agent), None) = (named.next(), named.next()) {
        return Ok((agent.clone(), reach));
    }
    let hidden = || {
        Error::Fault(Fault::Unavailable(format!(
            "the device of rank {} ({text}) is hidden from the HSA runtime ({}) of {}, which copies \
             there: let ROCR_VISIBLE_DEVICES name it too, or use EngineKind::Streams",
            peer.peer,
            hsa.calls.file().display(),
            context.label()
        )))
    };
    let device = find(context.hip, &peer.device)?.ok_or_else(hidden)?;
    Ok((find_agent(agents, &device)?, reach))
}

fn ways_to(hsa: &Hsa, found: &[Option<(Agent, Reach)>], own: &Agent, index: usize) -> Option<Ways> {
    let (peer, reach) = found[index].as_ref()?;
    // Ranks on one device share its links.
    let mut links: Vec<u64> = Vec::new();
    for (other, _) in found.iter().flatten().filter(|(_, other)| other == reach) {
        if !links.contains(&other.handle.handle) {
            links.push(other.handle.handle);
        }
    }
    let asked = *reach != Reach::Own;
    // A runtime that does not count them may still name some.
    let (plain, xgmi) = own.sdma_engines(hsa).unwrap_or_default();
    let placement = Placement::of(&Facts {
        reach: *reach,
        can_name: hsa::can_name(hsa),
        preferred: asked.then(|| hsa::preferred(hsa, own, peer)).flatten(),
        available: asked.then(|| hsa::available(hsa, own, peer)).flatten(),
        plain,
        xgmi,
        index: links.iter().position(|link| *link == peer.handle.handle).unwrap_or(0),
        among: links.len(),
    });
    Some(Ways { put: placement, get: placement })
}

/// Bytes per second of a copy to another visible device by all engines of the link, for the slowest
/// link; 0 where there is none, or where the HSA runtime does not say.
pub(crate) fn striped_rate(context: &Context) -> u64 {
    rates(context).ok().and_then(|rates| rates.into_iter().min()).unwrap_or(0)
}

fn rates(context: &Context) -> Result<Vec<u64>, Error> {
    let hsa = Hsa::load()?;
    let all = agents(hsa)?;
    let own = find_agent(&all, &context.found)?;
    let (mut found, mut links) = (Vec::new(), Vec::new());
    for device in visible_devices(context.hip)? {
        let link = between(context.hip, &context.found, &device)?;
        let reach = match link.kind {
            LinkKind::Own => continue,
            LinkKind::Xgmi => Reach::Xgmi,
            _ => Reach::Pcie,
        };
        found.push(Some((find_agent(&all, &device)?, reach)));
        links.push(link.bytes_per_second);
    }
    let engines = |index| ways_to(hsa, &found, &own, index).map_or(0, |ways| ways.put.set.len());
    let rate = |(index, link): (usize, &Option<f64>)| rate_over(engines(index), *link);
    Ok(links.iter().enumerate().map(rate).collect())
}

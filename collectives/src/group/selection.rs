//! Says which backends and which GPU a group uses.

use std::fmt;

use peerlane_hal::BackendId;

/// The backends and the GPU that a rank of a group uses, with the reasons if they were chosen automatically.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Selection {
    /// The backend inside a node, or between all ranks if there is no network.
    pub local: BackendId,
    /// The number of this rank's GPU in its driver; `None` if the backend uses no GPU or the caller opened the fabric.
    pub device: Option<u32>,
    /// The backend between nodes; `None` if the local backend connects all ranks.
    pub network: Option<BackendId>,
    /// The reasons for an automatic choice, and why the group has one rank if no launcher has set the number of ranks. Empty if
    /// the caller chose.
    pub reasons: Vec<String>,
}

impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.local)?;
        if let Some(device) = self.device {
            write!(f, ", GPU {device}")?;
        }
        if let Some(network) = self.network {
            write!(f, ", {network} between nodes")?;
        }
        if self.reasons.is_empty() { Ok(()) } else { write!(f, " ({})", self.reasons.join("; ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selection_is_one_line() {
        let reasons = vec!["2 GPUs".to_owned(), "rdma: the ranks are on 2 machines".to_owned()];
        let (local, network) = (BackendId::CUDA, Some(BackendId::RDMA));
        let chosen = Selection { local, device: Some(1), network, reasons };
        let text = "cuda, GPU 1, rdma between nodes (2 GPUs; rdma: the ranks are on 2 machines)";
        assert_eq!(chosen.to_string(), text);
        let by_hand =
            Selection { local: BackendId::HOST, device: None, network: None, reasons: Vec::new() };
        assert_eq!(by_hand.to_string(), "host");
    }
}

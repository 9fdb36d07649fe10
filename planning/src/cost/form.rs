//! Describes the forms in which an all-reduce can run.

use serde::Serialize;

use crate::collective::Collective;
use crate::error::Error;
use crate::layout::BlockBytes;

/// How an all-reduce moves its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// Every rank sends its whole input to all others, and adds everything.
    Whole,
    /// Each rank adds one part, and passes it on to all others.
    InParts,
}

impl Form {
    /// Returns a short name of the form for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::InParts => "in parts",
        }
    }
}

/// One form of an operation, with the collective of its plans and the lengths of its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FormBlocks {
    /// The form of an all-reduce; `None` for other collectives.
    pub form: Option<Form>,
    /// The collective that the plans execute.
    pub collective: Collective,
    /// The lengths of the blocks that the plans move.
    pub blocks: BlockBytes,
}

/// Returns the forms in which an operation can run, at least one.
///
/// `blocks` are those of the caller: in an all-reduce, each rank's whole input.
///
/// # Errors
/// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if the lengths of an all-reduce
/// differ between ranks.
pub fn forms(
    collective: Collective,
    blocks: &BlockBytes,
    in_place: bool,
) -> Result<Vec<FormBlocks>, Error> {
    if collective != Collective::AllReduce {
        return Ok(vec![FormBlocks { form: None, collective, blocks: blocks.clone() }]);
    }

    let parts = FormBlocks { form: Some(Form::InParts), collective, blocks: blocks.parts()? };
    // In place, additions would overwrite what other lanes still send.
    if in_place {
        return Ok(vec![parts]);
    }

    // Every rank adds everything, as if it were the only receiver of a reduce-scatter.
    let whole = FormBlocks {
        form: Some(Form::Whole),
        collective: Collective::ReduceScatter,
        blocks: blocks.clone(),
    };
    Ok(vec![whole, parts])
}

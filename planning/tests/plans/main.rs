//! Tests plans, which are data: nothing here opens a group.
//!
//! | module | shows |
//! | --- | --- |
//! | `algorithms` | every schedule is verified on many topologies and shapes |
//! | `cost` | predicted times equal hand-computed ones, bytes are those that the plans carry, and choices are as in golden files |
//! | `golden` | the text of plans is that of golden files and of docs/PROTOCOLS.md |
//! | `mutation` | the verifier refuses every mutant of a plan for which an oracle finds harm |
//! | `plan_text` | plans are the same after a way through text or JSON |
//! | `planning` | lanes, puts and paths are as the schedules say, and making a plan takes little time |
//! | `property` | every collective and schedule gives the defined result on random topologies |
//! | `prove` | proofs of many ranks follow fewer plans and give the same verdict |
//! | `verify` | the verifier accepts correct plans, and names each fault of incorrect ones |

mod algorithms;
mod cost;
mod golden;
mod mutation;
mod plan_text;
mod planning;
mod property;
mod prove;
mod support;
mod verify;

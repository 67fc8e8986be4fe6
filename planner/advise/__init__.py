"""Does prefill/decode disaggregation pay for this model, prompt length and link? `commutator advise`; docs/advise.md."""

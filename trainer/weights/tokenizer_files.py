"""Names of the files that belong to a tokenizer, or to generation, beside a model."""

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tiktoken.model"),
    *("chat_template.jinja", "chat_template.json"),
)

GENERATION_CONFIG = "generation_config.json"

from trainer_client.attach import Attached as Attached
from trainer_client.attach import attach as attach
from trainer_client.attach import log_scalars as log_scalars
from trainer_client.attach.ahead import ahead as ahead
from trainer_client.attach.own_forwards import core_attention as core_attention
from trainer_client.attach.own_forwards import flash_attn_func as flash_attn_func
from trainer_client.attach.own_forwards import flash_attn_varlen_func as flash_attn_varlen_func
from trainer_client.local_attention.at_home import at_home as at_home
from trainer_client.local_attention.at_home import served_forward as served_forward
from trainer_client.loops.loss_weight import labels_per_rank as labels_per_rank
from trainer_client.loops.tree import pack_tree as pack_tree
from trainer_client.loops.tree_batches import pack_nested_tree as pack_nested_tree
from trainer_client.loops.tree_batches import pack_padded_tree as pack_padded_tree

__version__: str
